-- Whether a lease of that length that ends then is good now; twin of statestore/leases.py. One with more than twice its
-- length left was taken before the clock was set back.
local function lease_runs(expires_ms, lease_ms, now_ms)
  local left_ms = tonumber(expires_ms or 0) - now_ms
  return left_ms > 0 and left_ms <= 2 * tonumber(lease_ms or 0)
end
