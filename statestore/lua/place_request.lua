-- Weighs instances by the caller's weights, takes the one of least cost, and queues the request there; dispatches it at
-- once if nothing waits and there is room. Reserves nothing where what the caller asks for does not hold. A request that may
-- be served in two ways has two sides: the least of each is found, and these are compared.
-- ARGV  1 clock, 2 ask as JSON (statestore/redis/placing.py), 3 chain, packed, 4 what the replica tells of the request, as
--       JSON, 5 the head of the chain for the arrival log, packed
-- Reply JSON [status, instance id or null, next best or null, uncached tokens, enqueued ms, epoch, tree version, now ms,
--       queue or null, leg], and of each instance that was weighed: id, JSON (instance_json), apart so that no caller has to parse
--       what he does not ask for
local now_ms, ask, chain = store_now_ms(), cjson.decode(ARGV[2]), ARGV[3]
local seen, known, best, second, side = {}, {}, nil, nil, ask
ask.told = cjson.decode(ARGV[4])

local function reply(status, request, queue)
  local versions = redis.call('HMGET', keys.meta, 'epoch', 'tree_version')
  local id = request and '"' .. request.instance_id .. '"' or 'null'
  local other_id = request and request.alternative_id and '"' .. request.alternative_id .. '"' or 'null'
  return { string.format('["%s",%s,%s,%d,%d,%s,%s,%d,%s,"%s"]', status, id, other_id,
    request and request.uncached_tokens or 0, request and request.enqueued_ms or 0, versions[1] or 0, versions[2] or 0,
    now_ms, queue or 'null', request and request.leg or 'whole'), unpack(seen) }
end

local function consider(id)
  local instance = not known[id] and read_instance(id)
  known[id] = true
  if not instance then
    return
  end
  local offer = weigh(instance, chain, ask, side, best and best.hit, now_ms)
  seen[#seen + 1] = id
  seen[#seen + 1] = instance_json(instance, offer.hit)
  if not takes_requests(instance, side.leg) then
    return
  elseif not best or offer.cost < best.cost then
    best, second = offer, best
  elseif not second or offer.cost < second.cost then
    second = offer
  end
end

local function samples_of_chain()
  local samples = {}
  for place, depth in ipairs(ask.samples_at) do
    samples[place] = string.sub(chain, depth * 8 - 7, depth * 8)
  end
  return samples
end

-- Weighs others where they may cost less. Their least cost: the prefill that the deepest known hit leaves.
local function look_beyond(samples)
  if side.beyond + idle_cost(best.instance, #chain / 8, ask, side) >= best.cost then
    return
  end
  local holder, sample = find_holder(samples)
  local least_cost = side.beyond + idle_cost(best.instance, math.max(best.hit, ask.samples_at[sample] or 0), ask, side)
  for _, role in ipairs(side.roles) do
    if holder and least_cost < best.cost and redis.call('ZSCORE', keys.least_loaded .. role, holder) then
      consider(holder)
    end
  end
  for _, role in ipairs(side.roles) do
    local ranking = redis.call('ZRANGE', keys.least_loaded .. role, 0, terms.least_loaded - 1, 'WITHSCORES')
    for index = 1, #ranking, 2 do
      if ranking[index + 1] + least_cost < best.cost then
        consider(ranking[index])
      end
    end
  end
end

local function excluded()
  local ids = {}
  for _, id in ipairs(ask.excluded or {}) do
    ids[id] = true
  end
  return ids
end

local function weigh_side(samples)
  best, second, known = nil, nil, excluded()
  for _, id in ipairs(side.instances) do
    consider(id)
  end
  if best and side.beyond then
    look_beyond(samples)
  end
end

-- A repetition after a lost answer gets the present state; another request of the id is left alone.
local former = read_request(ask.request_id)
if former then
  if former.told.replica_id ~= ask.told.replica_id or former.told.attempt ~= ask.told.attempt then
    return reply('duplicate')
  end
  known = excluded()
  consider(former.instance_id)
  former.alternative_id = nil
  return reply(former.state == 'held' and 'held' or 'dispatched', former)
end
local samples = samples_of_chain()
weigh_side(samples)
if ask.other then
  local first, next_best = best, second
  side = ask.other
  weigh_side(samples)
  if first and not (best and best.decides < first.decides) then
    best, second, side = first, next_best, ask
  end
end
if not best then
  return reply('not_ready')
end

local decodes = side.leg == 'decode' -- a second leg: prefilled elsewhere, so never held
local instance, described = best.instance, best.instance.described
local resident, enqueued_ms = resident_blocks(instance.id, chain, best.hit, best.stamp), ask.enqueued_ms or now_ms
local tokens = uncached_tokens(ask.told.prompt_tokens, ask.block_tokens, resident)
local is_idle = instance.dispatched_tokens == 0 and instance.context_tokens < described.kv_capacity_tokens
local goes_now = decodes or instance.queued_requests == 0 and (
  has_room(instance, ask.at_once and math.huge) and (is_idle or not (ask.defers and best.missed))
  or ask.defers and is_calm(instance, tokens, enqueued_ms + ask.rank_ms, now_ms))
-- Weighed by reserved blocks as well. Counted by these only where requests go in the order in which they came: those
-- that reserved them go before it.
local request = {
  id = ask.request_id, told = ask.told, instance_id = instance.id, leg = side.leg,
  state = decodes and 'prefilled' or goes_now and 'dispatched' or 'held', prefilled_ms = decodes and now_ms or nil,
  uncached_tokens = (goes_now or ask.defers) and tokens or best.uncached,
  enqueued_ms = enqueued_ms, dispatched_ms = goes_now and now_ms or nil,
  deferred = false,
  alternative_id = second and second.instance.id, alternative_uncached_tokens = second and second.uncached,
}
if ask.max_pending_tokens and instance.pending_tokens > ask.max_pending_tokens then
  return reply('stale', request)
end
if ask.refuses and best.missed then
  return reply('missed', request)
end
if not goes_now and ask.told.attempt == 1 and instance.queued_requests >= described.max_queued_requests then
  return reply('queue_full', request)
end

if goes_now then
  resident = #chain / 8
  redis.call('HSET', keys.request .. request.id, 'placed', placed_json(request), 'told', ARGV[4])
else
  redis.call('HSET', keys.request .. request.id, 'placed', placed_json(request), 'told', ARGV[4],
    'chain', chain, 'block_tokens', ask.block_tokens)
end
enter(instance, request, request.enqueued_ms + ask.rank_ms, now_ms)
instance.assigned_tokens = instance.assigned_tokens + (decodes and 0 or request.uncached_tokens)
stamp_chain(instance, chain, ask.block_tokens, resident, settled_blocks(best.hit, best.stamp))
write_instance(instance)
if not decodes then
  stamp_samples(samples, instance.id)
end
if ask.told.attempt == 1 and not decodes then
  redis.call('XADD', keys.arrivals, 'MAXLEN', '~', terms.arrivals, '*', 'at', now_ms, 'head', ARGV[5])
end
lease_first(ask.told.replica_id, now_ms)
if ask.rebalances and best.missed then
  redis.call('ZADD', keys.rebalance_wanted, 'NX', now_ms, instance.id)
  if second and second.missed then
    redis.call('ZADD', keys.rebalance_wanted, 'NX', now_ms, second.instance.id)
  end
end
return reply(goes_now and 'dispatched' or 'held', request, goes_now and 'null' or room_json(instance, now_ms))
