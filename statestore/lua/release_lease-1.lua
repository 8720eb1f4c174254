-- Steps down. The fence stays, so that the next one is higher.
-- KEYS  1 leader
-- ARGV  1 unused, 2 fence
-- Reply 1, or 0 if the lease was lost already
-- Clock none
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[1], 'owner', 'expires_ms', 'lease_ms')
return 1
