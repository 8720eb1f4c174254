-- Becomes leader if nobody is; asking again as the leader keeps the fence.
-- KEYS  1 leader
-- ARGV  1 test clock ms or '', 2 owner, 3 lease ms
-- Reply {fence, expires ms}, or 0 if somebody else leads
-- Clock the server's; the fence is taken from it where that is ahead, so that it grows even over a lost store
-- include: clock
-- include: lease
local now_ms = store_now_ms()
local lease = redis.call('HMGET', KEYS[1], 'owner', 'fence', 'expires_ms', 'lease_ms')
local fence = tonumber(lease[2] or 0)
local held = lease[1] and lease_runs(lease[3], lease[4], now_ms)
if held and lease[1] ~= ARGV[2] then
  return 0
end
if not held then
  fence = math.max(fence + 1, now_ms)
end
local expires_ms = now_ms + tonumber(ARGV[3])
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'fence', fence, 'expires_ms', expires_ms, 'lease_ms', ARGV[3])
return { fence, expires_ms }
