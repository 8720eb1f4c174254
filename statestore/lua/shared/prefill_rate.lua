-- include: account
-- Twin of scheduling/prefill_rate.py: decayed sums of prefilled tokens and of the busy seconds they took.
local MEMORY_S = 30
local PRIOR_S = 2
local LONGEST_STALL_S = 10

local function learn_rate(account, now_ms, tokens, dispatched_ms)
  local busy_s = math.max(0, now_ms - math.max(account.last_prefill_ms, dispatched_ms)) / 1000
  busy_s = math.min(busy_s, LONGEST_STALL_S + tokens / tokens_per_s(account))
  local keep = MEMORY_S / (MEMORY_S + busy_s)
  account.rate_tokens = account.rate_tokens * keep + tokens
  account.rate_busy_s = account.rate_busy_s * keep + busy_s
end
