-- Changes the parts of this pool in budgets that are divided among pools (scheduling/tenants/allotments.py). A part does not fall
-- below the amount that is used of it. The pool no longer wants more of such a budget, until the next draw.
-- ARGV  1 clock; then 8 for each budget: its name, the name of its book, the number of its kind, the amount that is divided, the part
--       that this pool has where none is entered, the stamp of this change, the part that it is to have, the amount that is unused in
--       other pools
-- Reply for each the part that it has, or -1 where the stamp is not above that of the last change
local replies, changed = {}, 0
for first = 2, #ARGV, 8 do
  local name, of, kind, amount = ARGV[first], ARGV[first + 1], tonumber(ARGV[first + 2]), tonumber(ARGV[first + 3])
  local begins_with, stamp, wanted = tonumber(ARGV[first + 4]), tonumber(ARGV[first + 5]), tonumber(ARGV[first + 6])
  local part, _, former = part_of(redis.call('HGET', keys.budgets_allotted, name), amount, begins_with)
  if former >= stamp then
    replies[#replies + 1] = -1
  else
    if not books[of] then
      read_books({ of }, now_ms)
    end
    local place = place_of(books[of], kind)
    local used = place and settle(books[of], place, part / 60, now_ms) or 0
    if wanted < part then
      wanted = math.max(wanted, math.min(part, math.ceil(used)))
    end
    if place then
      books[of][1], has_changes = true, true -- from now on it leaks at another rate
    end
    redis.call('HSET', keys.budgets_allotted, name, string.format('%d %d %d %d', wanted, amount, stamp, tonumber(ARGV[first + 7])))
    redis.call('HDEL', keys.budgets_wanted, name)
    replies[#replies + 1], changed = wanted, changed + 1
  end
end
write_books(now_ms)
if changed > 0 then
  redis.call('HINCRBY', keys.budgets_allotted, '*', changed)
end
return replies
