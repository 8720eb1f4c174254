local instances = require('shared.instances')
local kv = require('shared.kv')
local records = require('records')
local rules = require('rules')
local tiers = require('shared.tiers')
local overtaken_by, idle_instance = instances.overtaken_by, records.idle_instance
local hit_blocks, most_blocks, prefill_tokens = kv.hit_blocks, kv.most_blocks, kv.prefill_tokens
local features_at, stalled_s = rules.features_at, rules.stalled_s
local decode = cjson.decode

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

-- What a placement would cost on an instance of one option, an expected miss of its SLO included; and what is
-- compared with the other option.
local function weigh(instance, chain, placement, option, guess, now_ms)
  local prompt_tokens = placement.told.prompt_tokens
  local most = most_blocks(prompt_tokens, placement.block_tokens)
  local hit, stamp, listed = hit_blocks(instance.id, chain, guess, most)
  local load = instance.tiers > 0 and option.leg ~= 'decode'
    and tiers.cheapest_load(instance, chain, placement.block_tokens, prompt_tokens, hit, instance.loading_ms / 1000)
  local found = load and hit + load.blocks or hit
  local uncached = prefill_tokens(prompt_tokens, placement.block_tokens, found)
  local features = features_at(instance, overtaken_by(instance, placement.precedes), stalled_s(instance, now_ms),
    terms.stall_from_s, uncached, prompt_tokens, placement.hot_tokens or 0, load and load.load_s or 0)
  local ttft_s, cost = weighted(option.ttft, features), weighted(option.cost, features)
  local missed = ttft_s > placement.slo_s
  return { instance = instance, hit = hit, stamp = stamp, listed = listed, load = load, found = found,
    uncached = uncached, missed = missed, ttft_s = ttft_s,
    cost = cost + (missed and weighted(option.missed, features) or 0),
    decides = placement.other and weighted(option.decider, features),
    running = instance.running_requests, context = instance.context_tokens }
end

-- An instance with nothing to do.
local idle = idle_instance()

-- What it would cost on one with nothing to do and such a hit, as fast as this one.
local function idle_cost(instance, hit, placement, option)
  local prompt_tokens = placement.told.prompt_tokens
  local uncached = prefill_tokens(prompt_tokens, placement.block_tokens, hit)
  idle.tokens_per_s = instance.tokens_per_s
  return weighted(option.cost, features_at(idle, 0, 0, terms.stall_from_s,
    uncached, prompt_tokens, placement.hot_tokens or 0, 0))
end

return { options_from = options_from, weigh = weigh, idle_cost = idle_cost }
