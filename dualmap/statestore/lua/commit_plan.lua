-- Carries out a plan for the queue of an instance, if nothing has changed there since: dispatches requests, or defers
-- them to another place in the queue, and tells the replicas of those that are dispatched. An entry whose request is
-- gone leaves the queue. Each step is logged.
-- ARGV  1 clock, 2 instance id, 3 version that the plan was made for, 4 replica id that needs no message, 5 tokens that
--       the plan passed over; then 2 for each request: its id, the rank to defer it to or '' to dispatch it
-- Reply {queue, grant, …}; the queue is nil where it has no room, and where the plan was stale it is all; a grant is
--       JSON: [request id, instance id, replica id, attempt, uncached tokens, was deferred, running without it, their
--       context]
local instances = require('shared.instances')
local kv = require('shared.kv')
local queue_log = require('shared.queue_log')
local requests = require('shared.requests')
local rules = require('rules')
local shares = require('shared.shares')
local tiers = require('shared.tiers')
local write_books = require('shared.book_end')
local ipairs, tonumber, tostring, unpack = ipairs, tonumber, tostring, unpack
local call, format, match, min = redis.call, string.format, string.match, math.min

local FIRST_STEP = 6

-- Of the call.
local now_ms, instance

-- Counts the request again: by now those before it may have brought its prefix. What it pulls is listed with its first
-- token.
local function dispatch(request)
  local chain, block_tokens, samples =
    unpack(call('HMGET', keys.request .. request.id, 'chain', 'block_tokens', 'samples'))
  if chain then
    local prompt_tokens = request.told.prompt_tokens
    local most = kv.most_blocks(prompt_tokens, block_tokens)
    local hit, stamp, listed = kv.hit_blocks(instance, chain, nil, most)
    local resident = kv.resident_blocks(instance.id, chain, hit, stamp)
    local loads = request.load_ms > 0 and tiers.found_blocks(instance, chain, resident) or 0
    local tokens = kv.prefill_tokens(prompt_tokens, block_tokens, resident + loads)
    request.uncached_tokens = request.load_ms > 0 and min(tokens, request.uncached_tokens) or tokens -- it may pull
    if not samples or request.load_ms == 0 then -- one that was moved pulls nothing
      kv.stamp_chain(instance, chain, block_tokens, #chain / 8, hit, stamp, listed, prompt_tokens)
      if instance.tiers > 0 then
        tiers.stamp_chain(instance, chain, block_tokens, now_ms)
      end
      call('HDEL', keys.request .. request.id, 'chain', 'block_tokens', 'samples')
    end
  end
  request.state, request.deferred, request.dispatched_ms = 'dispatched', 0, now_ms
  local held = rules.context_tokens_of(request) / instance.kv_capacity_tokens
  shares.give_work(request.told.shares_as, request.uncached_tokens / instance.tokens_per_s, held)
end

-- Carries out one step; the grant of a request that is dispatched.
local function carry_out(request, rank)
  local was_deferred, replica_id, grant = request.deferred == 1, request.told.replica_id, nil
  requests.leave(instance, request, now_ms)
  if rank == '' then
    dispatch(request)
    queue_log.log_dispatch(instance, 'granted', request, now_ms)
    grant = format('["%s","%s","%s",%d,%d,%s,%d,%d]', request.id, instance.id, replica_id, request.told.attempt,
      request.uncached_tokens, tostring(was_deferred), instance.running_requests, instance.context_tokens)
  else
    request.deferred = 1
    queue_log.log_deferral(instance, request, ARGV[4], now_ms)
  end
  requests.write_placed(request)
  requests.enter(instance, request, rank, now_ms)
  if grant and replica_id ~= ARGV[4] then
    call('PUBLISH', keys.grants .. replica_id, grant)
  end
  return grant
end

-- Of a request whose key is gone, by hand: planned again and again, it would keep others waiting.
local function drop_entry(request_id)
  for _, entry in ipairs(instances.head_entries(instance.id)) do
    if match(entry, '(.*) ') == request_id then
      call('ZREM', keys.queue .. instance.id, entry)
    end
  end
end

local function commit_plan(at_ms)
  now_ms, instance = at_ms, instances.read(ARGV[2])
  if not instance then
    return {}
  elseif instance.version ~= tonumber(ARGV[3]) then
    return { instances.queue_head(instance, now_ms) }
  end
  local grants = {}
  instance.passed_over_tokens = tonumber(ARGV[5])
  for step = FIRST_STEP, #ARGV, 2 do
    local request = requests.read(ARGV[step], 'told')
    if not request then
      drop_entry(ARGV[step])
    elseif request.state == 'held' and request.instance_id == instance.id then
      grants[#grants + 1] = carry_out(request, ARGV[step + 1])
    end
  end
  instances.write(instance)
  write_books(now_ms)
  return { instances.room(instance, now_ms), unpack(grants) }
end

return commit_plan
