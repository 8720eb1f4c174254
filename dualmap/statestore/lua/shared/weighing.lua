local adapters = require('shared.adapters')
local instances = require('shared.instances')
local kv = require('shared.kv')
local records = require('records')
local rules = require('rules')
local tiers = require('shared.tiers')
local overtaken_by, idle_instance = instances.overtaken_by, records.idle_instance
local hit_blocks, most_blocks, prefill_tokens = kv.hit_blocks, kv.most_blocks, kv.prefill_tokens
local features_at, stalled_s = rules.features_at, rules.stalled_s
local ipairs = ipairs
local decode = cjson.decode
local max, min = math.max, math.min

-- The last options that were decoded, and their text: most calls have the same ones.
local last_options = {}

local function options_from(text)
  if last_options.text ~= text then
    last_options.text, last_options.decoded = text, decode(text)
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

-- Gives an offer its cost with one load, where that costs less, or the same with an earlier first token.
local function weigh_load(offer, placement, option, load, overtaken, stall_s)
  local prompt_tokens, found = placement.told.prompt_tokens, offer.hit + load.blocks
  local uncached = prefill_tokens(prompt_tokens, placement.block_tokens, found)
  local features = features_at(offer.instance, overtaken, stall_s, terms.stall_from_s, uncached, prompt_tokens,
    placement.hot_tokens or 0, load.load_s, load.own_s, offer.adapter_s)
  local ttft_s = weighted(option.ttft, features)
  local missed = ttft_s > placement.slo_s
  local cost = weighted(option.cost, features) + (missed and weighted(option.missed, features) or 0)
  if offer.cost and (cost > offer.cost or (cost == offer.cost and ttft_s >= offer.ttft_s)) then
    return
  end
  offer.load, offer.found, offer.uncached, offer.missed = load, found, uncached, missed
  offer.cost, offer.ttft_s = cost, ttft_s
  offer.decides = placement.other and weighted(option.decider, features)
end

-- What a placement would cost on an instance of one option, an expected miss of its SLO included; and what is
-- compared with the other option. Whether to load from tiers is weighed as different placements are.
local function weigh(instance, chain, placement, option, guess, now_ms)
  local most = most_blocks(placement.told.prompt_tokens, placement.block_tokens)
  local hit, stamp, listed = hit_blocks(instance, chain, guess, most)
  local overtaken, stall_s = overtaken_by(instance, placement.precedes), stalled_s(instance, now_ms)
  -- With all fields from the start, so that the table does not grow.
  local offer = { instance = instance, hit = hit, stamp = stamp, listed = listed, running = instance.running_requests,
    context = instance.context_tokens, load = NO_LOAD, found = hit, uncached = 0, missed = false, ttft_s = 0,
    cost = false, decides = false,
    adapter_s = placement.told.adapter and adapters.wait_s(instance, placement.told.adapter) or 0 }
  if instance.tiers == 0 or option.leg == 'decode' then
    weigh_load(offer, placement, option, NO_LOAD, overtaken, stall_s)
    return offer
  end
  local loads, forbids, takes_limits, found =
    tiers.loads_behind(instance, chain, placement.block_tokens, placement.told.prompt_tokens, hit)
  if takes_limits or #loads == 0 then
    weigh_load(offer, placement, option, { blocks = 0, own_s = 0, load_s = 0 }, overtaken, stall_s)
  end
  for _, load in ipairs(loads) do
    weigh_load(offer, placement, option, load, overtaken, stall_s)
  end
  local blocks, all = offer.load.blocks, #loads > 0 and loads[#loads].blocks or 0
  offer.load.most_tokens = (blocks < all or forbids) and blocks * placement.block_tokens or -1
  offer.load.found = found
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
    running = offer.running, context = offer.context, adapter_s = offer.adapter_s, unpulled = offer.uncached }
  weigh_load(pulled, placement, option, { blocks = load.blocks + blocks, own_s = max(load.own_s, own_s),
    load_s = max(load.load_s, ends_s), most_tokens = -1, found = load.found, pull = { source = source.id,
    host = source.pull_end.host, port = source.pull_end.port, tokens = blocks * block_tokens, own_s = own_s } },
    overtaken_by(instance, placement.precedes), stalled_s(instance, now_ms))
  local cold_tokens = pulled.found * block_tokens - max(offer.found * block_tokens, placement.hot_tokens or 0)
  pulled.copies_s = source.leaves and 0 or rules.copy_s(instance, max(0, cold_tokens), block_tokens)
  return pulled
end

-- An instance with nothing to do.
local idle = idle_instance()

-- What it would cost on one with nothing to do and such a hit, as fast as this one.
local function idle_cost(instance, hit, placement, option)
  local prompt_tokens = placement.told.prompt_tokens
  local uncached = prefill_tokens(prompt_tokens, placement.block_tokens, hit)
  idle.tokens_per_s = instance.tokens_per_s
  return weighted(option.cost, features_at(idle, 0, 0, terms.stall_from_s,
    uncached, prompt_tokens, placement.hot_tokens or 0, 0, 0, 0))
end

return { options_from = options_from, weigh = weigh, weigh_pull = weigh_pull, idle_cost = idle_cost }
