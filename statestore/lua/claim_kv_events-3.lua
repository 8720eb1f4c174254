-- Takes the KV events of an instance over, if no living subscriber has them.
-- KEYS  1 subscribers, 2 record of the events, 3 instance
-- ARGV  1 clock, 2 worker id
-- Reply the record (HGETALL), or 0 if it is another's, or the instance is unknown
-- include: clock, leases
local owner, now_ms = redis.call('HGET', KEYS[2], 'owner'), store_now_ms()
if redis.call('EXISTS', KEYS[3]) == 0
  or (owner and owner ~= '' and owner ~= ARGV[2] and replica_alive(KEYS[1], owner, now_ms)) then
  return 0
end
-- It grows even where the instance was removed and added again, so that no fence is ever given twice.
local fence = math.max((redis.call('HGET', KEYS[2], 'fence') or 0) + 1, now_ms)
redis.call('HSET', KEYS[2], 'owner', ARGV[2], 'fence', string.format('%d', fence))
return redis.call('HGETALL', KEYS[2])
