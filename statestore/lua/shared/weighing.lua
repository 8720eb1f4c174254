-- Weighted sums over the counts of an instance; the caller defines the weights (scheduling/weights.py).
local function weighted(weights, features)
  local sum = 0
  for name, weight in pairs(weights) do
    sum = sum + weight * (features[name] or 0)
  end
  return sum
end

local function features_of(instance, uncached, prompt_tokens, now_ms)
  local described = instance.described
  local rate, kv_demand = described.tokens_per_s, instance.context_tokens / described.kv_capacity_tokens
  local overtaken, dispatched_s, silent_s = overtaken_tokens(instance), instance.dispatched_tokens / rate, 0
  if instance.pending_tokens > instance.deferred_tokens then
    silent_s = math.max(0, now_ms - math.max(instance.last_prefill_ms, instance.work_since_ms)) / 1000
  end
  return {
    constant = 1, ahead_s = (instance.pending_tokens - overtaken) / rate, overtaken_s = overtaken / rate, kv_demand = kv_demand,
    compute_s = uncached / rate, uncached_tokens = uncached, attention_pairs = uncached * (prompt_tokens - uncached / 2),
    crowded_compute_s = uncached / rate * kv_demand, stall_s = silent_s >= terms.stall_from_s and silent_s or 0,
    progress_s = math.min(silent_s, dispatched_s, 2 * dispatched_s + terms.stall_from_s - silent_s),
    running_share = instance.running_requests / described.max_running_requests,
    decoding_compute_s = uncached / rate * instance.running_requests, prompt_tokens = prompt_tokens,
  }
end

-- What the request of an ask would cost on an instance of one side, an expected miss of its SLO included; and what is
-- compared with the other side.
local function weigh(instance, chain, ask, side, guess, now_ms)
  local hit, stamp = hit_blocks(instance.id, chain, guess)
  local uncached = uncached_tokens(ask.told.prompt_tokens, ask.block_tokens, hit)
  local features = features_of(instance, uncached, ask.told.prompt_tokens, now_ms)
  local missed = weighted(side.ttft, features) > ask.slo_s
  local cost = weighted(side.cost, features) + (missed and weighted(side.missed, features) or 0)
  return { instance = instance, hit = hit, stamp = stamp, uncached = uncached, missed = missed, cost = cost,
    decides = side.decider and weighted(side.decider, features) }
end

-- What it would cost on one with nothing to do and such a hit, as fast as this one.
local function idle_cost(instance, hit, ask, side)
  local uncached = uncached_tokens(ask.told.prompt_tokens, ask.block_tokens, hit)
  return weighted(side.cost, {
    constant = 1, compute_s = uncached / instance.described.tokens_per_s, uncached_tokens = uncached,
    attention_pairs = uncached * (ask.told.prompt_tokens - uncached / 2), prompt_tokens = ask.told.prompt_tokens,
  })
end
