-- include: account
-- include: load
-- include: ttft_model
-- Twin of scheduling/idle_holder.py: the candidate that leaves nothing to weigh. A candidate here has first, the
-- place of its first key, stored (see load.lua) and hit, in blocks; a newcomer prompt_tokens, block_tokens and slo_ms.

local EVICTING_FROM, EVICTING_FULLY = 0.7, 1.1

-- Twin of scheduling/placement_cost.py.
local function weigh(candidate, newcomer, recompute_weight, eviction_weight)
  local stored = candidate.stored
  local figures = {
    rate_tokens = tonumber(stored[RATE_TOKENS]), rate_busy_s = tonumber(stored[RATE_BUSY_S]),
    context_tokens = tonumber(stored[CONTEXT_TOKENS]), kv_capacity_tokens = tonumber(stored[KV_CAPACITY_TOKENS]),
  }
  local blocks = math.min(candidate.hit, math.floor((newcomer.prompt_tokens - 1) / newcomer.block_tokens))
  candidate.context_tokens = figures.context_tokens
  candidate.tokens_per_s = tokens_per_s(figures)
  candidate.uncached_tokens = newcomer.prompt_tokens - blocks * newcomer.block_tokens
  local cached_tokens = redis.call('ZCARD', KEYS[candidate.first + 3]) * newcomer.block_tokens
  local squeezed = (kv_demand(figures) - EVICTING_FROM) / (EVICTING_FULLY - EVICTING_FROM)
  local evicting = math.min(1, cached_tokens / math.max(1, figures.kv_capacity_tokens))
    * math.min(1, math.max(0, squeezed))
  local weight = recompute_weight * (1 + eviction_weight * evicting)
  candidate.least_cost_s = weight * candidate.uncached_tokens / candidate.tokens_per_s
    + kv_weight_s * kv_demand(figures)
end

local function ttft_features_of(candidate, newcomer)
  local uncached, cached = candidate.uncached_tokens, newcomer.prompt_tokens - candidate.uncached_tokens
  return {
    0, math.floor(1000 * (uncached / candidate.tokens_per_s)),
    math.floor(uncached * (2 * cached + uncached) / 2000000), candidate.context_tokens,
  }
end

-- The chosen one, its features and expected TTFT in seconds, and the other one if there is another; or nil.
local function idle_holder(candidates, newcomer, weights, holder_blocks)
  local recompute_weight, eviction_weight = string.match(weights, '^(%S+) (%S+)$')
  recompute_weight, eviction_weight = tonumber(recompute_weight), tonumber(eviction_weight)
  local ready, chosen, deepest = {}, nil, holder_blocks
  for _, candidate in ipairs(candidates) do
    if candidate.stored and candidate.stored[STATE] == 'ready' then
      weigh(candidate, newcomer, recompute_weight, eviction_weight)
      ready[#ready + 1] = candidate
      deepest = math.max(deepest, candidate.hit)
      if not chosen or candidate.least_cost_s < chosen.least_cost_s then
        chosen = candidate
      end
    end
  end
  if not chosen or tonumber(chosen.stored[PENDING_TOKENS]) ~= 0 or chosen.hit < deepest then
    return nil
  end
  local model = chosen.stored[TTFT_WEIGHTS] and cjson.decode(chosen.stored[TTFT_WEIGHTS]) or PRIOR_WEIGHTS
  local features = ttft_features_of(chosen, newcomer)
  local expected_ttft_s = math.max(0, dot(model, 1, scaled(features)))
  if expected_ttft_s > newcomer.slo_ms / 1000 then
    return nil
  end
  return chosen, features, expected_ttft_s, ready[chosen == ready[1] and 2 or 1]
end
