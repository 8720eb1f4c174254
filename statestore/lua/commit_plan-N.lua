-- Carries out a plan for the queue of an instance, if nothing has changed there since: dispatches requests, or defers them to
-- another place in the queue, and tells the replicas of those that are dispatched or rejected.
-- KEYS  1-4 instance, 5 least loaded; then the requests of the plan
-- ARGV  1 clock, 2 instance id, 3 version that the plan was made for, 4 channel of grants without the replica's id,
--       5 replica id that needs no message, 6 tokens that the plan passed over; then 3 for each request: its id, the rank to
--       defer it to or '' to dispatch it, '1' to reject it as well
-- Reply JSON: ['stale', queue] | ['done', [grant, …], queue or null] | ['gone'] without an instance;
--       a grant is [request id, instance id, replica id, attempt, uncached tokens or -1: rejected, was deferred]
-- include: clock, kv, request, instance
local FIRST_REQUEST, FIRST_STEP = 6, 7
local now_ms, instance, id = store_now_ms(), read_instance(1), ARGV[2]
if not instance then
  return '["gone"]'
elseif instance.version ~= tonumber(ARGV[3]) then
  return '["stale",' .. queue_json(1, now_ms) .. ']'
end

-- Counts the request again: by now those before it may have brought its prefix.
local function dispatch(key, request)
  local chain = read_chain(key)
  if chain then
    local resident = resident_blocks(instance.kv_key, chain.hashes, hit_blocks(instance.kv_key, chain.hashes))
    request.uncached_tokens = uncached_tokens(request.prompt_tokens, chain.block_tokens, resident)
    stamp_chain(instance, chain.hashes, chain.block_tokens, #chain.hashes / 8)
    redis.call('HDEL', key, 'chain', 'block_tokens')
  end
  request.state, request.deferred, request.dispatched_ms = 'dispatched', false, now_ms
  redis.call('HSET', key, 'state', request.state, 'dispatched_ms', now_ms, 'uncached_tokens', request.uncached_tokens,
    'deferred', 0, 'rejected', 0)
end

-- Carries out one step; the grant where the request's replica has to know of it.
local function carry_out(key, request_id, request, rank, rejected)
  local was_deferred, dispatched = request.deferred, rank == ''
  leave(instance, request_id, request)
  if dispatched then
    dispatch(key, request)
  else
    request.deferred = true
    redis.call('HSET', key, 'deferred', 1, 'rejected', rejected and 1 or 0)
  end
  enter(instance, request_id, request, rank, now_ms)
  if dispatched or rejected then
    local grant = string.format('["%s","%s","%s",%d,%d,%s]', request_id, id, request.replica_id, request.attempt,
      dispatched and request.uncached_tokens or -1, tostring(dispatched and was_deferred))
    if request.replica_id ~= ARGV[5] then
      redis.call('PUBLISH', ARGV[4] .. request.replica_id, grant)
    end
    return grant
  end
end

local grants = {}
instance.passed_over_tokens = tonumber(ARGV[6])
for place = FIRST_REQUEST, #KEYS do
  local step, request = FIRST_STEP + 3 * (place - FIRST_REQUEST), read_request(KEYS[place])
  if request and request.state == 'held' and request.instance_id == id then
    grants[#grants + 1] = carry_out(KEYS[place], ARGV[step], request, ARGV[step + 1], ARGV[step + 2] == '1')
  end
end
write_instance(instance, id, KEYS[5])
return '["done",[' .. table.concat(grants, ',') .. '],' .. room_json(instance, now_ms) .. ']'
