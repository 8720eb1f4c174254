-- Places requests, one after the other: weighs instances by the caller's weights, takes the one of least cost, and
-- queues the request there; dispatches it at once if nothing waits and there is room. Reserves nothing where what the
-- caller asks for does not hold. A request that may be served in two ways has two options: the least of each is found,
-- and these are compared.
-- ARGV  1 clock, 2 the different options, as a JSON array; then 6 for each request: placement as JSON
--       (statestore/pool/placing.py), with the turn that it is where runs wait for memory; chain, packed; what its
--       replica tells of it, as JSON; the head of the chain for the arrival log, packed; its draws, packed
--       (BudgetGroup.packed), or ''; of its tenant's share the weight, instances and name, packed, or ''
-- Reply for each {status, instance id or '', next best or '', uncached tokens, enqueued ms, epoch, tree version, now
--       ms, queue or nil, leg, expected TTFT in seconds, requests that ran there and their context tokens, budgets
--       (weigh_draws) or nil, of a tenant with a share its level, the work that it sent and its share, packed, or nil,
--       what is loaded from tiers, as JSON {id: [blocks, seconds, seconds alone, most tokens or -1, [[tier, blocks that
--       it has, ms of their last use], …]], …}, with the source, its host and port, the tokens and the seconds of its
--       pull alone as one more entry where a part is pulled, or nil, how it waits for its adapter, as JSON {id:
--       [seconds of its load, of that into host memory before, turns], …}, or nil, and of each instance that was
--       weighed: its id, its record, its hit}
local adapters = require('shared.adapters')
local books = require('shared.books')
local budgets = require('shared.budgets')
local decoded = require('shared.decoded')
local instances = require('shared.instances')
local kv = require('shared.kv')
local leases = require('shared.leases')
local prefix_index = require('shared.prefix_index')
local pulls = require('shared.pulls')
local queue_log = require('shared.queue_log')
local records = require('records')
local requests = require('shared.requests')
local rules = require('rules')
local runs = require('shared.runs')
local shares = require('shared.shares')
local tiers = require('shared.tiers')
local usage = require('shared.usage')
local weighing = require('shared.weighing')
local write_books = require('shared.book_end')
local error, ipairs, pcall, type, unpack = error, ipairs, pcall, type, unpack
local call, format, sub, max, decode = redis.call, string.format, string.sub, math.max, cjson.decode
local ceil = math.ceil
local finds_memory, placed_text = rules.finds_memory, records.placed_text
local takes_requests, weigh = instances.takes_requests, weighing.weigh
local pack, unpack_from = struct.pack, struct.unpack

local FIRST_REQUEST = 3

-- Of the call.
local now_ms, leased, replies, versions, options

-- Of the request that is placed at the moment.
local placement, chain, samples, excluded, best, second, option, drawn, kept, standing, loaded, adapter_waits

-- What was weighed for it, as replied, and for its option. One list each for all requests, of which so many entries are
-- of this one: a new list would grow four times.
local seen, seen_count, offers, offer_count = {}, 0, {}, 0

-- What the try before it drew, where that stands: as its record has it, packed, and when.
local drawn_before, drawn_ms

local function reply(status, request, queue)
  local told, offer = request or {}, best or { ttft_s = 0, running = 0, context = 0 }
  return { status, told.instance_id or '', told.alternative_id or '', told.uncached_tokens or 0,
    told.enqueued_ms or 0, versions[1] or 0, versions[2] or 0, now_ms, queue or false, told.leg or 'whole',
    format('%.17g', offer.ttft_s), offer.running, offer.context, drawn or false, standing or false,
    loaded and tiers.text_of(loaded) or false, adapter_waits and adapters.text_of(adapter_waits) or false,
    unpack(seen, 1, seen_count) }
end

local function rank(offer)
  if not best or offer.cost < best.cost then
    best, second = offer, best
  elseif not second or offer.cost < second.cost then
    second = offer
  end
end

-- Notes what is loaded there, and the hit with that.
local function note_load(offer)
  local load, place = offer.load, seen_count - 2
  while seen[place] ~= offer.instance.id do
    place = place - 3
  end
  seen[place + 2] = offer.found
  if load.blocks > 0 or load.most_tokens >= 0 then
    loaded = loaded or {}
    loaded[offer.instance.id] = load
  end
end

-- Whether an instance must not be weighed, or was already.
local function is_known(id)
  for place = 1, offer_count do
    if offers[place].instance.id == id then
      return true
    end
  end
  return excluded and excluded[id]
end

local function consider(id)
  local instance = not is_known(id) and instances.read(id)
  if not instance then
    return
  end
  local offer = weigh(instance, chain, placement, option, best and best.hit, now_ms)
  seen[seen_count + 1], seen[seen_count + 2], seen[seen_count + 3] = id, instance.text, offer.found
  seen_count = seen_count + 3
  if instance.tiers > 0 then
    note_load(offer)
  end
  if offer.host_s and (offer.host_s > 0 or offer.disk_s > 0 or offer.slot_turns > 0) then
    adapter_waits = adapter_waits or {}
    adapter_waits[id] = offer
  end
  offer_count = offer_count + 1
  offers[offer_count] = offer
  if takes_requests(instance, option.leg) then
    rank(offer)
  end
end

-- Whether an instance beyond the candidates serves the model name of the request, where only some do, and is of its
-- revision, where that matters. One whose list is not known serves any name.
local function serves_name(id)
  local told = placement.told
  local description = (told.model ~= '' or told.revision) and call('HGET', keys.instances, id)
  local described = decoded(description) or {}
  if told.revision and told.revision ~= (described.revision ~= '' and described.revision or terms.unlabelled) then
    return false
  end
  return told.model == '' or type(described.models) ~= 'table' or described.models[told.model] ~= nil
end

-- Weighs others where they may cost less. Their least cost: the prefill that the deepest known hit leaves.
local function look_beyond()
  if option.beyond + weighing.idle_cost(best.instance, #chain / 8, placement, option) >= best.cost then
    return
  end
  local holder, sample = prefix_index.find_holder(samples)
  local deepest = max(best.found, placement.samples_at[sample] or 0)
  local least_cost = option.beyond + weighing.idle_cost(best.instance, deepest, placement, option)
  for _, role in ipairs(option.roles) do
    if holder and least_cost < best.cost
      and call('ZSCORE', keys.least_loaded .. role, holder) and serves_name(holder) then
      consider(holder)
    end
  end
  for _, role in ipairs(option.roles) do
    local ranking = call('ZRANGE', keys.least_loaded .. role, 0, terms.least_loaded - 1, 'WITHSCORES')
    for index = 1, #ranking, 2 do
      if ranking[index + 1] + least_cost < best.cost and serves_name(ranking[index]) then
        consider(ranking[index])
      end
    end
  end
end

-- The source that has most of the prompt, or has it first, among the instances that were weighed and the one that was
-- named for it, or else last given it.
local function best_source()
  local source
  local function compare(found)
    local waits_s = found and max(found.queued_s, found.computing_s)
    if found and (not source or found.blocks > source.blocks
      or found.blocks == source.blocks and waits_s < max(source.queued_s, source.computing_s)) then
      source = found
    end
  end
  for place = 1, offer_count do
    local offer = offers[place]
    if offer.instance.tiers > 0 then
      compare(pulls.source_of(offer.instance, chain, offer.hit, offer.stamp, now_ms))
    end
  end
  local holder = placement.source or prefix_index.find_holder(samples)
  if holder and not is_known(holder) and (not placement.told.revision or serves_name(holder)) then
    compare(pulls.read_source(holder, chain, #chain / 8, now_ms))
  end
  return source
end

-- Weighs the instances again with what they could pull, where that pays.
local function weigh_pulls()
  local source = best_source()
  if not source then
    return
  end
  local without = best
  best, second = nil, nil
  for place = 1, offer_count do
    local offer = offers[place]
    local is_open = takes_requests(offer.instance, option.leg)
    local pulled = is_open and weighing.weigh_pull(offer, source, placement, option, now_ms)
    if pulled and rules.pull_pays(pulled.cost, offer.cost, pulled.ttft_s, without.ttft_s) then
      pulled.cost, offer = pulled.cost + pulled.copies_s, pulled
      note_load(offer)
    end
    if is_open then
      rank(offer)
    end
  end
end

local function weigh_option(given)
  option, best, second, excluded, offer_count = options[given.option], nil, nil, given.excluded, 0
  instances.read_several(given.instances)
  for _, id in ipairs(given.instances) do
    consider(id)
  end
  if best and option.beyond then
    look_beyond()
  end
  if best and best.instance.tiers > 0 and option.leg == 'whole' and not placement.no_pulls then
    weigh_pulls()
  end
end

-- Sets the best and the second of the option where it costs least.
local function weigh_options()
  weigh_option(placement)
  if placement.other then
    local first, next_best, first_option = best, second, option
    weigh_option(placement.other)
    if first and not (best and best.decides < first.decides) then
      best, second, option = first, next_best, first_option
    end
  end
end

-- A repetition after a lost answer gets the present state; another request of the id is left alone.
local function reply_again(former)
  if former.told.replica_id ~= placement.told.replica_id or former.told.attempt ~= placement.told.attempt then
    return reply('duplicate')
  end
  option, excluded, former.alternative_id, offer_count = options[placement.option], placement.excluded, '', 0
  consider(former.instance_id)
  return reply(former.state == 'held' and 'held' or 'dispatched', former)
end

-- Whether the request is dispatched without a plan, by the rules of scheduling/queues/queue_order.py for a queue of one
-- entry. One that is held although there is room is planned by its replica, which has the queue in the reply.
local function goes_at_once(instance, tokens, rank_ms, band)
  if option.leg == 'decode' then
    return true -- a second leg: prefilled elsewhere, so never held
  end
  if placement.fills then
    return instance.pending_tokens == 0 and instances.has_room(instance) and (instance.running_requests == 0
      or instance.context_tokens + tokens <= terms.fill_memory * instance.kv_capacity_tokens)
  end
  local is_idle = instance.dispatched_tokens == 0 and instance.context_tokens < instance.kv_capacity_tokens
  local is_late = placement.defers and best.missed -- among late requests a plan decides who goes
  local waits = instance.queued_requests > 0
  -- What is late, or fills idle room, waits for one of the highest class. Where its tenant is above its share, a plan
  -- knows which of them go first.
  if placement.band == 0 and band < terms.share_first_above and not is_late then
    waits = instance.pending_tokens > instance.dispatched_tokens + instance.deferred_tokens
  end
  return not waits and (not placement.defers or finds_memory(tokens, instance, instance.kv_capacity_tokens)) and (
    instances.has_room(instance, placement.at_once and math.huge) and (is_idle or not is_late)
    or placement.defers and instances.is_calm(instance, tokens, rank_ms, now_ms))
end

-- Draws what was weighed, in place of what the try before drew: in one step, so that no other request gets between.
local function draw()
  if drawn then
    if drawn_before then
      budgets.take_draws(drawn_before, drawn_ms, now_ms)
    end
    budgets.draw()
  end
end

-- Leases its replica for a first time, where it has no lease.
local function lease()
  if not leased[placement.told.replica_id] then
    leased[placement.told.replica_id] = true
    leases.lease_first(placement.told.replica_id, now_ms)
  end
end

-- Stores and counts the request, whose first blocks are resident already, and tells the leader of it.
local function enter_chosen(request, resident, told, head)
  local instance, key = best.instance, keys.request .. request.id
  if request.state == 'held' then
    local block_tokens = placement.block_tokens
    call('HSET', key, 'placed', placed_text(request), 'told', told, 'chain', chain, 'block_tokens', block_tokens)
  else
    call('HSET', key, 'placed', placed_text(request), 'told', told)
    resident = #chain / 8
  end
  if kept then
    call('ZREM', keys.passed_on, request.id)
  end
  draw()
  requests.enter(instance, request, request.enqueued_ms + placement.rank_ms + request.band * terms.band_ms
    + request.deferred * terms.deferred_ms, now_ms)
  if best.load.pull then
    pulls.keep_chain(key, chain, placement.block_tokens, samples)
  else
    kv.stamp_chain(instance, chain, placement.block_tokens, resident, best.hit, best.stamp, best.listed,
      request.told.prompt_tokens)
    if instance.tiers > 0 and request.state ~= 'held' then
      tiers.stamp_chain(instance, chain, placement.block_tokens, now_ms)
    end
  end
  if option.leg ~= 'decode' then
    instance.assigned_tokens = instance.assigned_tokens + request.uncached_tokens
    if not best.load.pull then
      prefix_index.stamp_samples(samples, instance.id)
    end
    if placement.told.attempt == 1 then
      call('XADD', keys.arrivals, 'MAXLEN', '~', terms.arrivals, '*', 'at', now_ms, 'head', head)
    end
  end
  instances.write(instance)
  lease()
  for _, offer in ipairs(placement.rebalances and best.missed and { best, second } or {}) do
    if offer.missed then
      call('ZADD', keys.rebalance_wanted, 'NX', now_ms, offer.instance.id)
    end
  end
end

-- Enters the turn that the request is in the ledger of runs, and returns whether it goes.
local function enter_turn(turn)
  local status = runs.enter(turn, chain, placement.memory_tokens, now_ms)
  runs.let_go(now_ms)
  return status == runs.GOES or runs.goes(turn) == runs.GOES
end

local function place_one(told, head)
  local former = requests.read(placement.request_id, 'told')
  -- The record of a try that is over, or of a turn that waited for memory.
  kept = former and former.instance_id == '' and former.told.replica_id == placement.told.replica_id
    and (former.told.attempt < placement.told.attempt or former.state == 'held')
  if former and not kept then
    return reply_again(former)
  end
  if placement.draws ~= '' then
    local fits
    if kept and (former.told.drawn or '') ~= '' then
      drawn_before, drawn_ms = budgets.draws_of_record(former.told.drawn), former.enqueued_ms
      local names = {}
      budgets.add_names_of(names, drawn_before)
      books.read_books(names, now_ms)
    end
    fits, drawn = budgets.weigh_draws(placement.draws, placement.divisions, placement.must_draw, now_ms, drawn_before)
    if not fits then
      if placement.told.account ~= '' then
        usage.add_usage(placement.told.account, usage.REFUSED)
      end
      return reply('limited')
    end
  end
  if placement.turn and not enter_turn(placement.turn) then
    if placement.told.account ~= '' then -- it counts for its tenant while it waits, on no instance
      draw()
      requests.enter_nowhere(placement.request_id, 'held', told, now_ms)
      lease()
    end
    return reply('parked')
  end
  local band, within, sender, name, weight, stood = placement.band or 0, false, nil, nil, 0, nil
  if placement.share ~= '' then
    local ready, level, fair
    weight, ready = unpack_from('<dd', placement.share)
    name = sub(placement.share, 17)
    sender = books.kept.books[name]
    level, within, fair, stood = shares.level_of(sender, weight, ready)
    band = band + level
    standing = placement.told.tenant ~= '' and pack('<Hdd', level, sender[books.SENT], fair)
  end
  placement.precedes = band == 0 and (within or placement.band)
  weigh_options()
  if not best then
    return reply('not_ready')
  end
  local instance, decodes, enqueued_ms = best.instance, option.leg == 'decode', placement.enqueued_ms or now_ms
  local resident = kv.resident_blocks(instance.id, chain, best.hit, best.stamp)
  local loads = resident == best.hit and best.load.blocks or 0
  local tokens = kv.prefill_tokens(placement.told.prompt_tokens, placement.block_tokens, resident + loads)
  local goes_now = goes_at_once(instance, tokens, enqueued_ms + placement.rank_ms, band)
  -- Weighed by reserved blocks as well. Counted by these only where requests go in the order in which they came: those
  -- that reserved them go before it.
  local request = {
    id = placement.request_id, told = placement.told, instance_id = instance.id, leg = option.leg,
    state = decodes and 'prefilled' or goes_now and 'dispatched' or 'held', prefilled_ms = 0,
    uncached_tokens = (goes_now or placement.defers) and tokens or best.uncached,
    enqueued_ms = enqueued_ms, dispatched_ms = goes_now and now_ms or 0,
    deferred = placement.fills and not goes_now and 1 or 0, band = band,
    load_ms = best.load.blocks > 0 and ceil(best.load.own_s * 1000) or 0,
    alternative_id = second and second.instance.id or '', -- one that is moved there pulls nothing
    alternative_uncached_tokens = second and (second.unpulled or second.uncached) or 0,
  }
  if placement.max_pending_tokens and instance.pending_tokens > placement.max_pending_tokens then
    return reply('stale', request)
  elseif placement.refuses and best.missed then
    return reply('missed', request)
  elseif not goes_now and placement.told.attempt == 1 and instance.queued_requests >= instance.max_queued_requests then
    return reply('queue_full', request)
  end
  enter_chosen(request, resident, told, head)
  if best.load.pull then
    pulls.book(request.id, best.load.pull, now_ms)
  end
  if goes_now and instance.queued_requests > 0 and not decodes then
    queue_log.log_dispatch(instance, 'passed', request, now_ms)
  end
  local held = goes_now and rules.context_tokens_of(request) / instance.kv_capacity_tokens or 0
  if sender then
    local work_s = tokens / instance.tokens_per_s
    local sent, given = placement.told.attempt == 1 and work_s or 0, goes_now and work_s or 0
    shares.send_work(sender, name, weight, sent, given, held, stood, now_ms)
  elseif goes_now then
    shares.give_work(placement.told.shares_as, 0, held)
  end
  return reply(goes_now and 'dispatched' or 'held', request, not goes_now and instances.room(instance, now_ms))
end

-- Reads the books that the placements need.
local function read_books_for(placements)
  local names = {}
  for _, each in ipairs(placements) do
    if each.draws ~= '' then
      budgets.add_names_of(names, each.draws)
    end
    if each.share ~= '' then
      books.add_tenant(names, sub(each.share, 17))
    end
    if each.turn and each.turn.share then
      books.add_tenant(names, each.turn.share[1])
    end
  end
  books.read_books(names, now_ms)
end

-- Places the requests, in order.
local function place_all(placements)
  for place, each in ipairs(placements) do
    local first = FIRST_REQUEST + 6 * (place - 1)
    placement, chain, samples, seen_count, best, second, loaded = each, ARGV[first + 1], {}, 0, nil, nil, nil
    drawn, standing, drawn_before, adapter_waits = nil, nil, nil, nil
    placement.told = decode(ARGV[first + 2])
    for sample, depth in ipairs(placement.samples_at) do
      samples[sample] = sub(chain, depth * 8 - 7, depth * 8)
    end
    replies[#replies + 1] = place_one(ARGV[first + 2], ARGV[first + 3])
  end
end

local function place_requests(at_ms)
  now_ms, leased, replies = at_ms, {}, {}
  versions = call('HMGET', keys.meta, 'epoch', 'tree_version')
  options = weighing.options_from(ARGV[2])
  local placements = {}
  for first = FIRST_REQUEST, #ARGV, 6 do
    local given = decode(ARGV[first])
    given.draws, given.share = ARGV[first + 4], ARGV[first + 5]
    placements[#placements + 1] = given
  end
  read_books_for(placements)
  local is_done, failure = pcall(place_all, placements)
  write_books(now_ms) -- in any case: the requests before one that failed are placed
  usage.write_usage(now_ms)
  runs.write_runs()
  if not is_done then
    error(failure, 0)
  end
  return replies
end

return place_requests
