-- Changes the parts of this pool in budgets that are divided among pools (scheduling/tenants/allotments.py). A part does not fall
-- below the amount that is used of it. The pool no longer wants more of such a budget, until the next draw.
-- ARGV  1 clock; then 7 for each budget: its name, the amount that is divided, how much of that leaks a second or 'day' or 'month',
--       the part that this pool has where none is entered, the stamp of this change, the part that it is to have, the amount that
--       is unused in other pools
-- Reply for each the part that it has, or -1 where the stamp is not above that of the last change
local replies, changed = {}, 0
for first = 2, #ARGV, 7 do
  local name, amount, leak = ARGV[first], tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2]) or ARGV[first + 2]
  local begins_with, stamp, wanted = tonumber(ARGV[first + 3]), tonumber(ARGV[first + 4]), tonumber(ARGV[first + 5])
  local part, _, former = part_of(redis.call('HGET', keys.budgets_allotted, name), amount, begins_with)
  if former >= stamp then
    replies[#replies + 1] = -1
  else
    leak = part_of_leak(leak, part, amount)
    local text = redis.call('HGET', keys.budgets, name)
    local used, period = used_of(text, leak, now_ms)
    if wanted < part then
      wanted = math.max(wanted, math.min(part, math.ceil(used)))
    end
    if text and not period and leak > 0 then
      redis.call('HSET', keys.budgets, name, budget_text(used, leak, period, now_ms)) -- from now on it leaks at another rate
    end
    redis.call('HSET', keys.budgets_allotted, name, string.format('%d %d %d %d', wanted, amount, stamp, tonumber(ARGV[first + 6])))
    redis.call('HDEL', keys.budgets_wanted, name)
    replies[#replies + 1], changed = wanted, changed + 1
  end
end
if changed > 0 then
  redis.call('HINCRBY', keys.budgets_allotted, '*', changed)
end
return replies
