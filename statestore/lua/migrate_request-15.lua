-- Moves a held request to another instance's queue; dispatches it there at once if there is room.
-- KEYS  1 leader, 2 requests, 3 migrations, 4-8 account, queue, running, kv, late of the source,
--       9-13 of the target, 14 chains of held requests, 15 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 request id, 4 source id, 5 target id, 6 reason, 7 fence
-- Reply 'migrated' | 'not_held' | 'not_ready' | 'queue_full'; error FENCED
-- Clock the server's
-- include: clock
-- include: fence
-- include: grants
-- include: window
local now_ms = store_now_ms()
local refused = fence_error(KEYS[1], ARGV[7], now_ms)
if refused then
  return refused
end
local request = read_request(KEYS[2], ARGV[3])
if not request or request.state ~= 'held' or request.instance_id ~= ARGV[4] then
  return 'not_held'
end
local target = read_account(9, ARGV[5])
if not target or not takes_requests(target) or ARGV[4] == ARGV[5] then
  return 'not_ready'
end
local uncached_there = request.prompt_tokens
if request.alternative_id == ARGV[5] then
  uncached_there = request.alternative_uncached_tokens
end
if is_full(target, uncached_there, request.enqueued_ms + request.slo_ms, now_ms) then
  return 'queue_full'
end
local source = read_account(4, ARGV[4])
if not source then
  return 'not_held'
end
leave(source, request)
write_account(source)
request.alternative_id = ARGV[4]
request.alternative_uncached_tokens = request.uncached_tokens
request.instance_id = ARGV[5]
request.uncached_tokens = uncached_there
request.ttft_features = nil
enter_anew(target, request, now_ms)
write_request(KEYS[2], request)
add_to_window(target, now_ms, uncached_there)
redis.call('HINCRBY', KEYS[3], ARGV[6], 1)
grant_next(KEYS[2], target, now_ms)
write_account(target)
return 'migrated'
