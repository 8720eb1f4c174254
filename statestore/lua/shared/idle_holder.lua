-- include: prefill_rate
-- include: ttft_model
-- Twin of scheduling/idle_holder.py: the candidate that leaves nothing to weigh. A candidate here has stored (see load.lua)
-- and hit, in blocks; a newcomer prompt_tokens, block_tokens and slo_ms.

local function weigh(candidate, newcomer, recompute_weight)
  local stored = candidate.stored
  local blocks = math.min(candidate.hit, math.floor((newcomer.prompt_tokens - 1) / newcomer.block_tokens))
  candidate.uncached_tokens = newcomer.prompt_tokens - blocks * newcomer.block_tokens
  candidate.tokens_per_s = math.max(1, tonumber(stored[7]) / tonumber(stored[8]))
  candidate.compute_s = candidate.uncached_tokens / candidate.tokens_per_s
  candidate.context_tokens = tonumber(stored[4])
  local kv_usage = math.min(1, candidate.context_tokens / math.max(1, tonumber(stored[11])))
  candidate.least_cost_s = recompute_weight * candidate.compute_s + kv_weight_s * kv_usage
end

local function ttft_features_of(candidate, newcomer)
  local uncached, cached = candidate.uncached_tokens, newcomer.prompt_tokens - candidate.uncached_tokens
  return {
    0, math.floor(1000 * candidate.compute_s), math.floor(uncached * (2 * cached + uncached) / 2000000),
    candidate.context_tokens,
  }
end

-- The chosen one, its features and expected TTFT in seconds, and the other one if there is another; or nil.
local function idle_holder(candidates, newcomer, recompute_weight, holder_blocks)
  local ready, chosen, deepest = {}, nil, holder_blocks
  for _, candidate in ipairs(candidates) do
    if candidate.stored and candidate.stored[1] == 'ready' then
      weigh(candidate, newcomer, recompute_weight)
      ready[#ready + 1] = candidate
      deepest = math.max(deepest, candidate.hit)
      if not chosen or candidate.least_cost_s < chosen.least_cost_s then
        chosen = candidate
      end
    end
  end
  if not chosen or tonumber(chosen.stored[2]) > 0 or chosen.hit < deepest then
    return nil
  end
  local weights = chosen.stored[15] and cjson.decode(chosen.stored[15]) or prior()
  local features = ttft_features_of(chosen, newcomer)
  local expected_ttft_s = math.max(0, dot(weights, 1, scaled(features)))
  if expected_ttft_s > newcomer.slo_ms / 1000 then
    return nil
  end
  return chosen, features, expected_ttft_s, ready[chosen == ready[1] and 2 or 1]
end
