-- Forgets an instance that has nothing queued and nothing running.
-- KEYS  1 meta, 2 instances, 3 wanted rebalances, 4-8 account, queue, running, kv, late of the instance, 9 lightest
-- ARGV  1 unused, 2 unused, 3 instance id
-- Reply 1, or 0 if it is unknown or busy
-- Clock none
if redis.call('SISMEMBER', KEYS[2], ARGV[3]) == 0
  or redis.call('ZCARD', KEYS[5]) > 0 or redis.call('ZCARD', KEYS[6]) > 0 or redis.call('ZCARD', KEYS[8]) > 0 then
  return 0
end
redis.call('DEL', KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8])
redis.call('ZREM', KEYS[9], ARGV[3])
redis.call('SREM', KEYS[2], ARGV[3])
redis.call('ZREM', KEYS[3], ARGV[3])
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
return 1
