-- include: placement_cost
-- include: ttft_model
-- Twin of scheduling/idle_holder.py: the candidate that leaves nothing to weigh. A candidate here has stored (see
-- load.lua) and hit, in blocks; a newcomer prompt_tokens, block_tokens and slo_ms.

local function weigh(candidate, newcomer, recompute_weight, eviction_weight)
  local stored = candidate.stored
  local figures = {
    rate_tokens = tonumber(stored[RATE_TOKENS]), rate_busy_s = tonumber(stored[RATE_BUSY_S]),
    context_tokens = tonumber(stored[CONTEXT_TOKENS]), kv_capacity_tokens = tonumber(stored[KV_CAPACITY_TOKENS]),
    cached_blocks = stored[CACHED_BLOCKS],
  }
  candidate.context_tokens = figures.context_tokens
  candidate.tokens_per_s = tokens_per_s(figures)
  candidate.uncached_tokens = uncached_tokens_after(newcomer, candidate.hit)
  candidate.least_cost_s =
    least_cost_s(figures, newcomer.block_tokens, candidate.uncached_tokens, recompute_weight, eviction_weight)
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
