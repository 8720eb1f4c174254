-- Forgets an instance that has nothing queued and nothing running.
-- KEYS  1 meta, 2 instances, 3 wanted rebalances, 4-7 instance, 8 least loaded, 9 record of its KV events, 10 their names
-- ARGV  1 clock, 2 instance id
-- Reply 1, or 0 if it is unknown or busy
if redis.call('SISMEMBER', KEYS[2], ARGV[2]) == 0 or redis.call('EXISTS', KEYS[5], KEYS[6]) > 0 then
  return 0
end
redis.call('UNLINK', KEYS[4], KEYS[7], KEYS[9], KEYS[10])
redis.call('ZREM', KEYS[8], ARGV[2])
redis.call('SREM', KEYS[2], ARGV[2])
redis.call('ZREM', KEYS[3], ARGV[2])
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
return 1
