-- Releases one request of a replica whose lease ran out; a replica that is alive again is left alone.
-- KEYS  1 leader, 2 replicas, 3 requests, 4-8 account, queue, running, kv, late of the instance, 9 chains of held
--       requests, 10 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 request id, 4 instance id, 5 replica id, 6 fence
-- Reply 1; 0 if nothing was left to release; the instance id where the request really is; error FENCED
-- Clock the server's
-- include: clock
-- include: fence
-- include: grants
-- include: replicas
local now_ms = store_now_ms()
local refused = fence_error(KEYS[1], ARGV[6], now_ms)
if refused then
  return refused
end
local request = read_request(KEYS[3], ARGV[3])
if not request or request.replica_id ~= ARGV[5] or replica_alive(KEYS[2], ARGV[5], now_ms) then
  return 0
end
if request.instance_id ~= ARGV[4] then
  return request.instance_id
end
release(KEYS[3], read_account(4, ARGV[4]), request, now_ms)
return 1
