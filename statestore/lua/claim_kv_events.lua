-- Takes the KV events of an instance over, if no living subscriber has them.
-- ARGV  1 clock, 2 instance id, 3 worker id
-- Reply the record (HGETALL), or 0 if it is another's, or the instance is unknown
local key, now_ms = keys.kv_events .. ARGV[2], store_now_ms()
local owner = redis.call('HGET', key, 'owner')
if redis.call('EXISTS', keys.instance .. ARGV[2]) == 0
  or (owner and owner ~= '' and owner ~= ARGV[3] and replica_alive(keys.subscribers, owner, now_ms)) then
  return 0
end
-- It grows even where the instance was removed and added again, so that no fence is ever given twice.
local fence = math.max((redis.call('HGET', key, 'fence') or 0) + 1, now_ms)
redis.call('HSET', key, 'owner', ARGV[3], 'fence', string.format('%d', fence))
return redis.call('HGETALL', key)
