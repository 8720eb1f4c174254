-- Removes a replica whose lease ran out, once its requests are released.
-- KEYS  1 leader, 2 replicas
-- ARGV  1 test clock ms or '', 2 replica id, 3 fence
-- Reply 1, or 0 if it is unknown or alive again; error FENCED
-- Clock the server's
-- include: clock
-- include: fence
-- include: replicas
local now_ms = store_now_ms()
local refused = fence_error(KEYS[1], ARGV[3], now_ms)
if refused then
  return refused
end
if replica_alive(KEYS[2], ARGV[2], now_ms) then
  return 0
end
return redis.call('HDEL', KEYS[2], ARGV[2])
