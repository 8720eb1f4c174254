local adapters = require('shared.adapters')
local kv = require('shared.kv')
local rules = require('rules')
local tiers = require('shared.tiers')
local hit_blocks, most_blocks, prefill_tokens = kv.hit_blocks, kv.most_blocks, kv.prefill_tokens
local features_at, idle_features = rules.features_at, rules.idle_features
local overtaken_tokens, stalled_s, waits_on = rules.overtaken_tokens, rules.stalled_s, adapters.waits_on
local ipairs, pairs = ipairs, pairs
local decode = cjson.decode
local max, min = math.max, math.min

-- The last options that were decoded, and their text: most calls have the same ones.
local last_options = {}

-- The sums of an option without the features of loads, which are the last ones, and 0 where nothing is loaded: most
-- placements load nothing.
local function without_loads(option)
  local plain = { cost = {}, ttft = {}, missed = {}, decider = {} }
  for name, weights in pairs(plain) do
    for index = 1, #option[name], 2 do
      if option[name][index] < terms.loads_from then
        weights[index], weights[index + 1] = option[name][index], option[name][index + 1]
      end
    end
  end
  return plain
end

local function options_from(text)
  if last_options.text ~= text then
    last_options.text, last_options.decoded = text, decode(text)
    for _, option in ipairs(last_options.decoded) do
      option.plain = without_loads(option)
    end
  end
  return last_options.decoded
end

-- Weighted sums over the counts of an instance; the caller defines the weights: place of a feature
-- (scheduling/estimates/weights.py), its weight, place, weight, …
local function weighted(weights, features)
  local sum = 0
  for index = 1, #weights, 2 do
    sum = sum + weights[index + 1] * features[weights[index]]
  end
  return sum
end

-- Nothing is loaded from tiers.
local NO_LOAD = { blocks = 0, own_s = 0, load_s = 0, most_tokens = -1 }

-- What a placement with one load costs by the sums of its option, an expected miss of its SLO included: the tokens that
-- are computed, whether the SLO is missed, the cost, the time to the first token, and what is compared with the other
-- option.
local function priced(instance, placement, sums, hit, load, host_s, disk_s, slot_turns, now_ms)
  local prompt_tokens = placement.told.prompt_tokens
  local uncached = prefill_tokens(prompt_tokens, placement.block_tokens, hit + load.blocks)
  local overtaken = overtaken_tokens(instance, placement.precedes and instance.yielding_tokens or 0)
  local features = features_at(instance, overtaken, stalled_s(instance, now_ms), terms.stall_from_s, uncached,
    prompt_tokens, placement.hot_tokens or 0, load.load_s, load.own_s, host_s, disk_s, slot_turns)
  local ttft_s, cost = weighted(sums.ttft, features), weighted(sums.cost, features)
  local missed = ttft_s > placement.slo_s
  if missed then
    cost = cost + weighted(sums.missed, features)
  end
  return uncached, missed, cost, ttft_s, placement.other and weighted(sums.decider, features)
end

-- Gives an offer one load, where that costs less, or the same with an earlier first token.
local function weigh_load(offer, placement, option, load, now_ms)
  local uncached, missed, cost, ttft_s, decides =
    priced(offer.instance, placement, option, offer.hit, load, offer.host_s, offer.disk_s, offer.slot_turns, now_ms)
  if not offer.cost or cost < offer.cost or (cost == offer.cost and ttft_s < offer.ttft_s) then
    offer.load, offer.found, offer.uncached, offer.missed = load, offer.hit + load.blocks, uncached, missed
    offer.cost, offer.ttft_s, offer.decides = cost, ttft_s, decides
  end
end

-- Gives an offer the load from tiers that costs least: whether to load is weighed as different placements are.
local function weigh_loads(offer, chain, placement, option, now_ms)
  local instance, told = offer.instance, placement.told
  local loads, forbids, takes_limits, found =
    tiers.loads_behind(instance, chain, placement.block_tokens, told.prompt_tokens, offer.hit)
  if takes_limits or #loads == 0 then
    weigh_load(offer, placement, option, { blocks = 0, own_s = 0, load_s = 0 }, now_ms)
  end
  for _, load in ipairs(loads) do
    weigh_load(offer, placement, option, load, now_ms)
  end
  local blocks, all = offer.load.blocks, #loads > 0 and loads[#loads].blocks or 0
  offer.load.most_tokens = (blocks < all or forbids) and blocks * placement.block_tokens or -1
  offer.load.found = found
end

-- What a placement would cost on an instance of one option.
local function weigh(instance, chain, placement, option, guess, now_ms)
  local told = placement.told
  local ends_early = instance.hit_step_tokens > 0 or instance.dropped_blocks > 0
  local most = ends_early and most_blocks(told.prompt_tokens, placement.block_tokens)
  local hit, stamp, listed = hit_blocks(instance, chain, guess, most)
  local loads_nothing = instance.tiers == 0 or option.leg == 'decode'
  if loads_nothing and not told.adapter then
    local uncached, missed, cost, ttft_s, decides =
      priced(instance, placement, option.plain, hit, NO_LOAD, 0, 0, 0, now_ms)
    -- With all fields from the start, so that the table does not grow; with those of adapters it were twice as large.
    return { instance = instance, hit = hit, stamp = stamp, listed = listed, running = instance.running_requests,
      context = instance.context_tokens, load = NO_LOAD, found = hit, uncached = uncached, missed = missed,
      cost = cost, ttft_s = ttft_s, decides = decides }
  end
  local host_s, disk_s, slot_turns = 0, 0, 0
  if told.adapter then
    host_s, disk_s, slot_turns = waits_on(instance, told.adapter, placement.adapter_share or 1)
  end
  local offer = { instance = instance, hit = hit, stamp = stamp, listed = listed, running = instance.running_requests,
    context = instance.context_tokens, cost = false, host_s = host_s, disk_s = disk_s, slot_turns = slot_turns }
  if loads_nothing then
    weigh_load(offer, placement, option, NO_LOAD, now_ms)
  else
    weigh_loads(offer, chain, placement, option, now_ms)
  end
  return offer
end

-- The same with what a source has beyond that; nil where it has no more of it. What the copy costs beside computing the
-- prompt there is in 'copies_s', what would be left to compute without the pull in 'unpulled'.
local function weigh_pull(offer, source, placement, option, now_ms)
  local instance, load, own = offer.instance, offer.load, tiers.tiers_of(offer.instance).pull
  local block_tokens = placement.block_tokens
  local blocks = min(source.blocks, most_blocks(placement.told.prompt_tokens, block_tokens)) - offer.found
  if not own or own.layout ~= source.pull_end.layout or source.id == instance.id or blocks <= 0 then
    return
  end
  local own_s = rules.load_time_s(own.start_s, own.token_s, blocks * block_tokens)
  local ends_s = rules.pull_ends_s(own_s, instance.loading_ms / 1000, source.queued_s, source.computing_s)
  local pulled = { instance = instance, hit = offer.hit, stamp = offer.stamp, listed = offer.listed,
    running = offer.running, context = offer.context, host_s = offer.host_s, disk_s = offer.disk_s,
    slot_turns = offer.slot_turns,
    unpulled = offer.uncached }
  weigh_load(pulled, placement, option, { blocks = load.blocks + blocks, own_s = max(load.own_s, own_s),
    load_s = max(load.load_s, ends_s), most_tokens = -1, found = load.found, pull = { source = source.id,
    host = source.pull_end.host, port = source.pull_end.port, tokens = blocks * block_tokens, own_s = own_s } }, now_ms)
  local cold_tokens = pulled.found * block_tokens - max(offer.found * block_tokens, placement.hot_tokens or 0)
  pulled.copies_s = source.leaves and 0 or rules.copy_s(instance, max(0, cold_tokens), block_tokens)
  return pulled
end

-- What it would cost on an instance with nothing to do and such a hit, as fast as this one, to which the request's
-- adapter is new: a request leaves the pair that has it only where that pays for the load that begins elsewhere.
local function idle_cost(instance, hit, placement, option)
  local prompt_tokens = placement.told.prompt_tokens
  local uncached = prefill_tokens(prompt_tokens, placement.block_tokens, hit)
  local adapter, host_s, disk_s = placement.told.adapter, 0, 0
  if adapter then
    host_s, disk_s = adapters.new_loads_s(instance, placement.adapter_share or 1)
  end
  local features = idle_features(instance.tokens_per_s, uncached, prompt_tokens, placement.hot_tokens or 0, host_s,
    disk_s)
  return weighted((adapter and option or option.plain).cost, features)
end

return { options_from = options_from, weigh = weigh, weigh_pull = weigh_pull, idle_cost = idle_cost }
