-- Ends a replica's lease. The entry stays, expired, until a reaper has seen to what the replica may have left.
-- KEYS  1 replicas
-- ARGV  1 unused, 2 replica id
-- Reply 1, or 0 if it is unknown
-- Clock none
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[2], cjson.encode({ expires_ms = 0, lease_ms = 0, beaten = false, info = {} }))
return 1
