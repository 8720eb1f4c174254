-- Becomes leader if no owner is, renews the leader's lease, or ends it. The fence of an ended one stays, so that the next is
-- higher; it is taken from the clock where that is ahead, so that it grows even over a lost store.
-- ARGV  1 clock, 2 owner, 3 lease ms, 0 to end it, 4 fence of the lease to renew or end, or ''
-- Reply {fence, expires ms}, or 0 if another owner leads; error FENCED
local now_ms = store_now_ms()
local owner, last_fence, ends_ms, lease_ms = unpack(redis.call('HMGET', keys.leader, 'owner', 'fence', 'expires_ms', 'lease_ms'))
local fence, expires_ms = tonumber(last_fence or 0), now_ms + ARGV[3]
local refused = fence_error(ARGV[4], now_ms)
if refused then
  return refused
elseif ARGV[3] == '0' then
  redis.call('HDEL', keys.leader, 'owner', 'expires_ms', 'lease_ms')
  return { fence, 0 }
elseif not owner or not lease_runs(ends_ms, lease_ms, now_ms) then
  fence = math.max(fence + 1, now_ms)
elseif owner ~= ARGV[2] then
  return 0
end
redis.call('HSET', keys.leader, 'owner', ARGV[2], 'fence', fence, 'expires_ms', expires_ms, 'lease_ms', ARGV[3])
return { fence, expires_ms }
