-- The first token came: releases pending tokens, stamps the prefill clock, learns rate and TTFT, grants who is next.
-- KEYS  1 requests, 2 holders of the new generation, 3 of the old, 4-8 account, queue, running, kv, late of the instance,
--       9 chains of held requests, 10 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 request id, 4 instance id, 5 chain, packed, 6 block tokens,
--       7 marks of the chain, packed, or '' to remember no holders, 8 marks of a generation at most,
--       9 '1' if it was seen, '' if it is presumed: nothing is learned from it then
-- Reply 1, or 0 if the request is unknown, elsewhere, or not waiting for its first token
-- Clock the server's
-- include: clock
-- include: grants
-- include: holders
-- include: kv
-- include: prefill_rate
-- include: ttft_model
local request = read_request(KEYS[1], ARGV[3])
if not request or request.instance_id ~= ARGV[4] or request.state ~= 'dispatched' then
  return 0
end
local now_ms = store_now_ms()
local account = read_account(4, ARGV[4])
if not account then
  return 0
end
account.pending_tokens = account.pending_tokens - request.uncached_tokens
account.dispatched_tokens = account.dispatched_tokens - request.uncached_tokens
if ARGV[9] == '1' then
  learn_rate(account, now_ms, request.uncached_tokens, request.dispatched_ms)
  if request.ttft_features and not request.late then
    learn_ttft(account, request.ttft_features, math.max(0, now_ms - request.enqueued_ms) / 1000)
  end
end
account.last_prefill_ms = now_ms
request.state = 'prefilled'
request.prefilled_ms = now_ms
if request.kv_instance_id ~= ARGV[4] then
  stamp_chain(account, ARGV[5], tonumber(ARGV[6]), #ARGV[5] / 8)
  stamp_holders(KEYS[2], KEYS[3], ARGV[7], tonumber(ARGV[8]), ARGV[4])
  request.kv_instance_id = ARGV[4]
end
write_request(KEYS[1], request)
grant_next(KEYS[1], account, now_ms)
write_account(account)
return 1
