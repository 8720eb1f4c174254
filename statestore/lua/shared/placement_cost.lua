-- include: account
-- include: kv
-- include: load
-- Twin of scheduling/placement_cost.py.
local EVICTING_FROM, EVICTING_FULLY = 0.7, 1.1

-- How much of what a recompute takes is taken from prefixes that others would find. Figures here have context_tokens,
-- cached_blocks and kv_capacity_tokens.
local function evicting(figures, block_tokens)
  local cached_share = math.min(1, figures.cached_blocks * block_tokens / math.max(1, figures.kv_capacity_tokens))
  local squeezed = (kv_demand(figures) - EVICTING_FROM) / (EVICTING_FULLY - EVICTING_FROM)
  return cached_share * math.min(1, math.max(0, squeezed))
end

-- What a request costs where the instance has nothing else to do.
local function least_cost_s(figures, block_tokens, uncached_tokens, recompute_weight, eviction_weight)
  local weight = recompute_weight * (1 + eviction_weight * evicting(figures, block_tokens))
  return weight * uncached_tokens / tokens_per_s(figures) + kv_weight_s * kv_demand(figures)
end
