-- Carries out a plan for the queue of an instance, if nothing has changed there since: dispatches requests, or defers them to
-- another place in the queue, and tells the replicas of those that are dispatched. An entry whose request is gone leaves the
-- queue. Each step is logged.
-- ARGV  1 clock, 2 instance id, 3 version that the plan was made for, 4 replica id that needs no message, 5 tokens that the
--       plan passed over; then 2 for each request: its id, the rank to defer it to or '' to dispatch it
-- Reply {queue, grant, …}; the queue is nil where it has no room, and where the plan was stale it is all; a grant is JSON:
--       [request id, instance id, replica id, attempt, uncached tokens, was deferred, running without it, their context]
local FIRST_STEP = 6
local instance = read_instance(ARGV[2])
if not instance then
  return {}
elseif instance.version ~= tonumber(ARGV[3]) then
  return { queue_head(instance, now_ms) }
end

-- Counts the request again: by now those before it may have brought its prefix.
local function dispatch(request)
  local chain, block_tokens = unpack(redis.call('HMGET', keys.request .. request.id, 'chain', 'block_tokens'))
  if chain then
    local hit, stamp = hit_blocks(instance.id, chain)
    local resident = resident_blocks(instance.id, chain, hit, stamp)
    request.uncached_tokens = prefill_tokens(request.told.prompt_tokens, block_tokens, resident)
    stamp_chain(instance, chain, block_tokens, #chain / 8, hit, stamp)
    redis.call('HDEL', keys.request .. request.id, 'chain', 'block_tokens')
  end
  request.state, request.deferred, request.dispatched_ms = 'dispatched', 0, now_ms
  give_work(request.told.shares_as, request.uncached_tokens / instance.tokens_per_s, context_tokens_of(request) / instance.kv_capacity_tokens)
end

-- Carries out one step; the grant of a request that is dispatched.
local function carry_out(request, rank)
  local was_deferred, replica_id, grant = request.deferred == 1, request.told.replica_id, nil
  leave(instance, request)
  if rank == '' then
    dispatch(request)
    log_dispatch(instance, 'granted', request, now_ms)
    grant = string.format('["%s","%s","%s",%d,%d,%s,%d,%d]', request.id, instance.id, replica_id, request.told.attempt,
      request.uncached_tokens, tostring(was_deferred), instance.running_requests, instance.context_tokens)
  else
    request.deferred = 1
    log_deferral(instance, request, ARGV[4], now_ms)
  end
  write_placed(request)
  enter(instance, request, rank, now_ms)
  if grant and replica_id ~= ARGV[4] then
    redis.call('PUBLISH', keys.grants .. replica_id, grant)
  end
  return grant
end

-- Of a request whose key is gone, by hand: planned again and again, it would keep others waiting.
local function drop_entry(request_id)
  for _, entry in ipairs(head_entries(instance.id)) do
    if string.match(entry, '(.*) ') == request_id then
      redis.call('ZREM', keys.queue .. instance.id, entry)
    end
  end
end

local grants = {}
instance.passed_over_tokens = tonumber(ARGV[5])
for step = FIRST_STEP, #ARGV, 2 do
  local request = read_request(ARGV[step], 'told')
  if not request then
    drop_entry(ARGV[step])
  elseif request.state == 'held' and request.instance_id == instance.id then
    grants[#grants + 1] = carry_out(request, ARGV[step + 1])
  end
end
write_instance(instance)
write_books(now_ms)
return { room(instance, now_ms), unpack(grants) }
