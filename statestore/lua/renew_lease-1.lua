-- Extends the leader's lease.
-- KEYS  1 leader
-- ARGV  1 test clock ms or '', 2 fence, 3 lease ms
-- Reply expires ms; error FENCED
-- Clock the server's
-- include: clock
-- include: fence
local now_ms = store_now_ms()
local refused = fence_error(KEYS[1], ARGV[2], now_ms)
if refused then
  return refused
end
local expires_ms = now_ms + tonumber(ARGV[3])
redis.call('HSET', KEYS[1], 'expires_ms', expires_ms, 'lease_ms', ARGV[3])
return expires_ms
