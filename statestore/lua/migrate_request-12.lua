-- Moves a held request to its place in another instance's queue, from where a plan may dispatch it.
-- KEYS  1 leader, 2 migrations, 3 request, 4-7 source, 8-11 target, 12 least loaded
-- ARGV  1 clock, 2 request id, 3 source id, 4 target id, 5 reason, 6 fence, 7 its rank after enqueued_ms
-- Reply JSON: ['migrated', queue of the target or null] | ['not_held'] | ['not_ready'] | ['queue_full']; error FENCED
-- include: clock, kv, leases, request, instance
local now_ms, request_id, source_id, target_id = store_now_ms(), ARGV[2], ARGV[3], ARGV[4]
local refused = fence_error(KEYS[1], ARGV[6], now_ms)
if refused then
  return refused
end
local request, source, target = read_request(KEYS[3]), read_instance(4), read_instance(8)
if not request or not source or request.state ~= 'held' or request.instance_id ~= source_id then
  return '["not_held"]'
elseif not target or not takes_requests(target) or source_id == target_id then
  return '["not_ready"]'
elseif target.queued_requests >= target.max_queued_requests then
  return '["queue_full"]'
end
local former_tokens, chain, tokens = request.uncached_tokens, read_chain(KEYS[3]), request.prompt_tokens
if chain then
  tokens = uncached_tokens(tokens, chain.block_tokens, hit_blocks(target.kv_key, chain.hashes))
end
leave(source, request_id, request)
request.uncached_tokens, request.deferred = tokens, false
enter(target, request_id, request, request.enqueued_ms + ARGV[7], now_ms)
target.assigned_tokens = target.assigned_tokens + tokens
redis.call('HSET', KEYS[3], 'instance_id', target_id, 'uncached_tokens', tokens, 'deferred', 0, 'rejected', 0,
  'alternative_id', source_id, 'alternative_uncached_tokens', former_tokens)
redis.call('HINCRBY', KEYS[2], ARGV[5], 1)
write_instance(source, source_id, KEYS[12])
write_instance(target, target_id, KEYS[12])
return '["migrated",' .. room_json(target, now_ms) .. ']'
