-- Grants whoever was held on one instance for as long as anybody may be, and those who can go by now.
-- KEYS  1 leader, 2 requests, 3-7 account, queue, running, kv, late of the instance, 8 chains of held requests,
--       9 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 instance id, 4 fence
-- Reply how many were dispatched; error FENCED
-- Clock the server's
-- include: clock
-- include: fence
-- include: grants
local now_ms = store_now_ms()
local refused = fence_error(KEYS[1], ARGV[4], now_ms)
if refused then
  return refused
end
local account = read_account(3, ARGV[3])
if not account or held_requests(account) == 0 then
  return 0
end
local granted = grant_next(KEYS[2], account, now_ms, nil, true)
write_account(account)
return granted
