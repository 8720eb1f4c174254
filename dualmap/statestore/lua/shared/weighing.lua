local instances = require('shared.instances')
local kv = require('shared.kv')
local overtaken_tokens = instances.overtaken_tokens
local hit_blocks, prefill_tokens = kv.hit_blocks, kv.prefill_tokens
local max, min, decode = math.max, math.min, cjson.decode

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

-- Seconds of own prefill that belong to the hot prefix of the request.
local function hot_compute_s(instance, uncached, placement)
  return max(0, (placement.hot_tokens or 0) - placement.told.prompt_tokens + uncached) / instance.tokens_per_s
end

local function features_of(instance, uncached, placement, now_ms)
  local rate, kv_demand = instance.tokens_per_s, instance.context_tokens / instance.kv_capacity_tokens
  local prompt_tokens, overtaken = placement.told.prompt_tokens, overtaken_tokens(instance, placement.precedes)
  local dispatched_s, silent_s = instance.dispatched_tokens / rate, 0
  if instance.pending_tokens > instance.deferred_tokens then
    silent_s = max(0, now_ms - max(instance.last_prefill_ms, instance.work_since_ms)) / 1000
  end
  local compute_s, running = uncached / rate, instance.running_requests
  return {
    1, (instance.pending_tokens - overtaken) / rate, overtaken / rate, kv_demand, compute_s, uncached,
    uncached * (prompt_tokens - uncached / 2), compute_s * kv_demand, silent_s >= terms.stall_from_s and silent_s or 0,
    min(silent_s, dispatched_s, 2 * dispatched_s + terms.stall_from_s - silent_s),
    running / instance.max_running_requests, compute_s * running, prompt_tokens,
    hot_compute_s(instance, uncached, placement),
  }
end

-- What a placement would cost on an instance of one option, an expected miss of its SLO included; and what is
-- compared with the other option.
local function weigh(instance, chain, placement, option, guess, now_ms)
  local hit, stamp = hit_blocks(instance.id, chain, guess)
  local uncached = prefill_tokens(placement.told.prompt_tokens, placement.block_tokens, hit)
  local features = features_of(instance, uncached, placement, now_ms)
  local ttft_s, cost = weighted(option.ttft, features), weighted(option.cost, features)
  local missed = ttft_s > placement.slo_s
  return { instance = instance, hit = hit, stamp = stamp, uncached = uncached, missed = missed, ttft_s = ttft_s,
    cost = cost + (missed and weighted(option.missed, features) or 0),
    decides = placement.other and weighted(option.decider, features),
    running = instance.running_requests, context = instance.context_tokens }
end

-- What it would cost on one with nothing to do and such a hit, as fast as this one.
local function idle_cost(instance, hit, placement, option)
  local prompt_tokens = placement.told.prompt_tokens
  local uncached = prefill_tokens(prompt_tokens, placement.block_tokens, hit)
  return weighted(option.cost, { 1, 0, 0, 0, uncached / instance.tokens_per_s, uncached,
    uncached * (prompt_tokens - uncached / 2), 0, 0, 0, 0, 0, prompt_tokens,
    hot_compute_s(instance, uncached, placement) })
end

return { options_from = options_from, weigh = weigh, idle_cost = idle_cost }
