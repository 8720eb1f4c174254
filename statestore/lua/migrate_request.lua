-- Moves a held request to its place in another instance's queue, from where a plan may dispatch it.
-- ARGV  1 clock, 2 request id, 3 source id, 4 target id, 5 reason, 6 fence, 7 its rank after enqueued_ms
-- Reply {'migrated', queue of the target or nil} | {'not_held'} | {'not_ready'} | {'queue_full'}; error FENCED
local now_ms = store_now_ms()
local refused = fence_error(ARGV[6], now_ms)
if refused then
  return refused
end
local request, source, target = read_request(ARGV[2], 'told'), read_instance(ARGV[3]), read_instance(ARGV[4])
if not request or not source or request.state ~= 'held' or request.instance_id ~= source.id then
  return { 'not_held' }
elseif not target or not takes_requests(target, request.leg) or source.id == target.id then
  return { 'not_ready' }
elseif target.queued_requests >= target.max_queued_requests then
  return { 'queue_full' }
end
local former_tokens, chain, tokens = request.uncached_tokens, read_chain(request.id), request.told.prompt_tokens
if chain then
  tokens = prefill_tokens(tokens, chain.block_tokens, (hit_blocks(target.id, chain.hashes)))
end
leave(source, request)
request.instance_id, request.uncached_tokens, request.deferred = target.id, tokens, 0
request.alternative_id, request.alternative_uncached_tokens = source.id, former_tokens
write_placed(request)
enter(target, request, request.enqueued_ms + ARGV[7], now_ms)
target.assigned_tokens = target.assigned_tokens + tokens
redis.call('HINCRBY', keys.migrations, ARGV[5], 1)
write_instance(source)
write_instance(target)
return { 'migrated', room(target, now_ms) }
