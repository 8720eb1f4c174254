-- Changes the parts of this pool in budgets that are divided among pools (scheduling/tenants/allotments.py). A part
-- does not fall below the amount that is used of it. The pool no longer wants more of such a budget, until the next
-- draw.
-- ARGV  1 clock; then 8 for each budget: its name, the name of its book, the number of its kind, the amount that is
--       divided, the part that this pool has where none is entered, the stamp of this change, the part that it is to
--       have, the amount that is unused in other pools
-- Reply for each the part that it has, or -1 where the stamp is not above that of the last change
local allotments = require('shared.allotments')
local books = require('shared.books')
local budgets = require('shared.budgets')
local write_books = require('shared.book_end')
local tonumber = tonumber
local call, max, min, ceil, format = redis.call, math.max, math.min, math.ceil, string.format

local function allot_budgets(now_ms)
  local replies, changed = {}, 0
  for first = 2, #ARGV, 8 do
    local name, of = ARGV[first], ARGV[first + 1]
    local kind, amount = tonumber(ARGV[first + 2]), tonumber(ARGV[first + 3])
    local begins_with, stamp, wanted = tonumber(ARGV[first + 4]), tonumber(ARGV[first + 5]), tonumber(ARGV[first + 6])
    local part, _, former = allotments.part_of(call('HGET', keys.budgets_allotted, name), amount, begins_with)
    if former >= stamp then
      replies[#replies + 1] = -1
    else
      if not books.kept.books[of] then
        books.read_books({ of }, now_ms)
      end
      local book = books.kept.books[of]
      local place = budgets.place_of(book, kind)
      local used = place and budgets.settle(book, place, part / 60, now_ms) or 0
      if wanted < part then
        wanted = max(wanted, min(part, ceil(used)))
      end
      if place then
        book[1], books.kept.has_changes = true, true -- from now on it leaks at another rate
      end
      local rest = tonumber(ARGV[first + 7])
      call('HSET', keys.budgets_allotted, name, format('%d %d %d %d', wanted, amount, stamp, rest))
      call('HDEL', keys.budgets_wanted, name)
      replies[#replies + 1], changed = wanted, changed + 1
    end
  end
  write_books(now_ms)
  if changed > 0 then
    call('HINCRBY', keys.budgets_allotted, '*', changed)
  end
  return replies
end

return allot_budgets
