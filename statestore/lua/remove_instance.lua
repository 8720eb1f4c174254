-- Forgets an instance that has nothing queued and nothing running.
-- ARGV  1 clock, 2 instance id
-- Reply 1, or 0 if it is unknown or busy
local id = ARGV[2]
if redis.call('SISMEMBER', keys.instances, id) == 0 or redis.call('EXISTS', keys.queue .. id, keys.running .. id) > 0 then
  return 0
end
redis.call('UNLINK', keys.instance .. id, keys.kv .. id, keys.kv_events .. id, keys.kv_names .. id)
for _, role in ipairs({ 'mixed', 'prefill', 'decode' }) do
  redis.call('ZREM', keys.least_loaded .. role, id)
end
redis.call('SREM', keys.instances, id)
redis.call('ZREM', keys.rebalance_wanted, id)
redis.call('HINCRBY', keys.meta, 'epoch', 1)
return 1
