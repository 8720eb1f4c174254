-- Weighs instances by the caller's weights, takes the one of least cost, and queues the request there; dispatches it at
-- once if nothing waits and there is room. Reserves nothing where what the caller asks for does not hold.
-- KEYS  1 meta, 2 replicas, 3 arrivals, 4 wanted rebalances, 5 prefix index, 6 its older generation, 7 least loaded,
--       8 request; then 4 for each instance of the ask
-- ARGV  1 clock, 2 ask as JSON (statestore/redis/placing.py), 3 chain, packed, 4.. samples of it, then fields of the
--       request: name, value, …
-- Reply JSON: [status, instance id or null, next best or null, uncached tokens, enqueued ms, epoch, tree version, now ms,
--       [place in the ask, its figures and hit, …], [[id, score], …] least loaded, [id, …] to ask as well, queue or null]
-- include: clock, prefix_index, leases, request, instance, terms, weighing
local FIRST_INSTANCE = 9
local now_ms, ask, chain = store_now_ms(), cjson.decode(ARGV[2]), ARGV[3]
local first_field = 4 + #ask.samples_at
local samples = { unpack(ARGV, 4, first_field - 1) }
local ranking = redis.call('ZRANGE', KEYS[7], 0, terms.least_loaded - 1, 'WITHSCORES')
local seen, weighed, to_ask, named = {}, {}, {}, {}
local best, second
for place, id in ipairs(ask.instances) do
  named[id] = place
end

-- The first hashes of the chain, one of each key block.
local function key_hashes(packed, stride)
  if not stride then
    return string.sub(packed, 1, terms.head_bytes)
  end
  local hashes, step = {}, 8 * stride
  for last = step, math.min(#packed, terms.head_bytes * stride), step do
    hashes[#hashes + 1] = string.sub(packed, last - 7, last)
  end
  return hashes[1] and table.concat(hashes) or string.sub(packed, -8)
end

local function reply(status, request, queue)
  local versions, ranked = redis.call('HMGET', KEYS[1], 'epoch', 'tree_version'), {}
  for index = 1, #ranking, 2 do
    ranked[#ranked + 1] = '["' .. ranking[index] .. '",' .. ranking[index + 1] .. ']'
  end
  local id = request and '"' .. request.instance_id .. '"' or 'null'
  local other_id = request and request.alternative_id and '"' .. request.alternative_id .. '"' or 'null'
  return string.format('["%s",%s,%s,%d,%d,%s,%s,%d,[%s],[%s],[%s],%s]', status, id, other_id,
    request and request.uncached_tokens or 0, request and request.enqueued_ms or 0, versions[1] or 0, versions[2] or 0,
    now_ms, table.concat(seen, ','), table.concat(ranked, ','), table.concat(to_ask, ','), queue or 'null')
end

local function consider(id)
  if weighed[id] then
    return
  end
  weighed[id] = true
  local place = named[id]
  local instance = place and read_instance(FIRST_INSTANCE + 4 * (place - 1))
  if not place then
    to_ask[#to_ask + 1] = '"' .. id .. '"'
  elseif instance then
    local offer = weigh(instance, chain, ask, now_ms)
    offer.id = id
    seen[#seen + 1] = place .. ',' .. instance_json(instance, offer.hit)
    if not takes_requests(instance) then
      return
    elseif not best or offer.cost < best.cost then
      best, second = offer, best
    elseif not second or offer.cost < second.cost then
      second = offer
    end
  end
end

-- Weighs others where they may cost less. Their least cost: the prefill that the deepest known hit leaves.
local function look_beyond()
  local holder, sample = find_holder(KEYS[5], KEYS[6], samples)
  local least_cost = ask.beyond + idle_cost(best.instance, math.max(best.hit, ask.samples_at[sample] or 0), ask)
  if holder and least_cost < best.cost and redis.call('ZSCORE', KEYS[7], holder) then
    consider(holder)
  end
  for index = 1, #ranking, 2 do
    if ranking[index + 1] + least_cost < best.cost then
      consider(ranking[index])
    end
  end
end

-- A repetition after a lost answer gets the present state; another request of the id is left alone.
if redis.call('EXISTS', KEYS[8]) == 1 then
  local known = read_request(KEYS[8])
  if known.replica_id ~= ask.replica_id or known.attempt ~= ask.attempt then
    return reply('duplicate')
  end
  consider(known.instance_id)
  return to_ask[1] and reply('look') or reply(known.state == 'held' and 'held' or 'dispatched', known)
end
for place = 1, ask.asked do
  consider(ask.instances[place])
end
if not best then
  return reply('not_ready')
end
if ask.beyond then
  look_beyond()
  if to_ask[1] then
    return reply('look')
  end
end

local instance = best.instance
local is_idle = instance.dispatched_tokens == 0 and instance.context_tokens < instance.kv_capacity_tokens
local goes_now = instance.queued_requests == 0 and has_room(instance) and (is_idle or not (ask.defers and best.missed))
-- Weighed by reserved blocks as well. Counted by these only where requests go in the order in which they came: those
-- that reserved them go before it.
local resident = resident_blocks(instance.kv_key, chain, best.hit)
local counted = (goes_now or ask.defers) and resident or best.hit
local request = {
  instance_id = best.id, replica_id = ask.replica_id, state = 'held', deferred = false, dispatched_ms = now_ms,
  uncached_tokens = uncached_tokens(ask.prompt_tokens, ask.block_tokens, counted), prompt_tokens = ask.prompt_tokens,
  context_tokens = ask.prompt_tokens + ask.expected_output_tokens, enqueued_ms = ask.enqueued_ms or now_ms,
  alternative_id = second and second.id,
}
if ask.max_pending_tokens and instance.pending_tokens > ask.max_pending_tokens then
  return reply('stale', request)
end
if ask.refuses and best.missed then
  return reply('missed', request)
end
if not goes_now and ask.attempt == 1 and instance.queued_requests >= instance.max_queued_requests then
  return reply('queue_full', request)
end

if goes_now then
  request.state, resident = 'dispatched', #chain / 8
  redis.call('HSET', KEYS[8], 'dispatched_ms', now_ms)
else
  redis.call('HSET', KEYS[8], 'chain', chain, 'block_tokens', ask.block_tokens)
end
if second then
  redis.call('HSET', KEYS[8], 'alternative_id', second.id, 'alternative_uncached_tokens', second.uncached)
end
redis.call('HSET', KEYS[8], 'instance_id', best.id, 'state', request.state, 'uncached_tokens', request.uncached_tokens,
  'enqueued_ms', request.enqueued_ms, unpack(ARGV, first_field))
enter(instance, ask.request_id, request, request.enqueued_ms + ask.rank_ms, now_ms)
instance.assigned_tokens = instance.assigned_tokens + request.uncached_tokens
stamp_chain(instance, chain, ask.block_tokens, resident)
write_instance(instance, best.id, KEYS[7])
stamp_samples(KEYS[5], KEYS[6], samples, best.id)
if ask.attempt == 1 then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', terms.arrivals, '*', 'at', now_ms, 'head', key_hashes(chain, ask.key_stride))
end
lease_first(KEYS[2], ask.replica_id, now_ms)
if ask.rebalances and best.missed then
  redis.call('ZADD', KEYS[4], 'NX', now_ms, best.id)
end
return reply(request.state, request, goes_now and 'null' or room_json(instance, now_ms))
