-- Releases whatever is left of a request and grants who is next.
-- KEYS  1 meta, 2 requests, 3-7 account, queue, running, kv, late of the instance, 8 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 request id, 4 instance id, 5 attempt or '' for any,
--       6 prior bytes per token, 7 prompt bytes or '', 8 prompt tokens or ''
-- Reply 1; 0 if nothing was left or a newer attempt lives; the instance id where the request really is
-- Clock the server's
-- include: clock
-- include: grants
-- include: text_ratio
local request = read_request(KEYS[2], ARGV[3])
if not request or (ARGV[5] ~= '' and request.attempt > tonumber(ARGV[5])) then
  return 0
end
if request.instance_id ~= ARGV[4] then
  return request.instance_id
end
local now_ms = store_now_ms()
local account = read_account(3, ARGV[4])
redis.call('HDEL', KEYS[2], request.request_id)
if not account then
  return 1 -- its instance was deleted by hand
end
leave(account, request)
if ARGV[7] ~= '' and ARGV[8] ~= '' then
  learn_text_ratio(KEYS[1], ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]))
end
grant_next(KEYS[2], account, now_ms)
write_account(account)
return 1
