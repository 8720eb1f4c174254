-- The first token came: releases pending tokens, stamps the prefill clock, logs a sample.
-- ARGV  1 clock, 2 request id, 3 instance id, 4 what to note of it beside the times, as JSON, or ''
-- Reply queue, as finish_request; 0 if the request does not wait there for this
-- include: clock, request
local now_ms, request, instance = store_now_ms(), read_placed(ARGV[2]), read_instance(ARGV[3])
if not request or not instance or request.instance_id ~= ARGV[3] or request.state ~= 'dispatched' then
  return 0
end
instance.pending_tokens = instance.pending_tokens - request.uncached_tokens
instance.dispatched_tokens = instance.dispatched_tokens - request.uncached_tokens
request.state, request.prefilled_ms = 'prefilled', now_ms
write_placed(request)
if ARGV[4] ~= '' then
  redis.call('XADD', keys.samples, 'MAXLEN', '~', terms.taught, '*', ARGV[3], string.format('%d %d %d %d %d %s',
    request.uncached_tokens, request.enqueued_ms, request.dispatched_ms, instance.last_prefill_ms, now_ms, ARGV[4]))
end
instance.last_prefill_ms = now_ms
write_instance(instance)
return room_json(instance, now_ms)
