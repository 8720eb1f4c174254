-- Releases whatever is left of a request and grants who is next.
-- KEYS  1 meta, 2 requests, 3-7 account, queue, running, kv, late of the instance, 8 chains of held requests,
--       9 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 request id, 4 instance id, 5 replica id or '' for any, 6 attempt or '' for any,
--       7 prior bytes per token, 8 prompt bytes or '', 9 prompt tokens or ''
-- Reply 1; 0 if nothing was left, another replica's request has the id or a newer attempt lives; the instance id where
--       the request really is
-- Clock the server's
-- include: clock
-- include: grants
-- include: text_ratio
local request = read_request(KEYS[2], ARGV[3])
if not request or (ARGV[5] ~= '' and request.replica_id ~= ARGV[5]) then
  return 0
end
if ARGV[6] ~= '' and request.attempt > tonumber(ARGV[6]) then
  return 0
end
if request.instance_id ~= ARGV[4] then
  return request.instance_id
end
local now_ms = store_now_ms()
local account = read_account(3, ARGV[4])
if account and ARGV[8] ~= '' and ARGV[9] ~= '' then
  learn_text_ratio(KEYS[1], ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9]))
end
release(KEYS[2], account, request, now_ms)
return 1
