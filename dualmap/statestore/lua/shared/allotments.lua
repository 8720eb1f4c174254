-- Budgets that are divided among pools (scheduling/tenants/allotments.py). A hash has the parts of this pool, by their
-- names, as 'PART OF STAMP REST': its part of an amount, the stamp of that change, and the amount that was unused in
-- other pools then.
local books = require('shared.books')
local kept = books.kept
local tonumber = tonumber
local call, format, floor, match = redis.call, string.format, math.floor, string.match

-- The part of a budget of this amount that a pool has, by its text: what it begins with where nothing is allotted. Also
-- whether it was allotted of this amount, the stamp, and what other pools had left.
local function part_of(text, amount, begins_with)
  local part, of, stamp, rest = match(text or '', '^(%d+) (%d+) (%d+) (%d+)$')
  if not part or tonumber(of) == 0 then
    return begins_with, false, 0, amount - begins_with
  end
  part, of = tonumber(part), tonumber(of)
  return of == amount and part or floor(part * amount / of), of == amount, tonumber(stamp), tonumber(rest)
end

-- Tells the leader that a request did not fit into the part of this pool, or that there is little left of it.
local function want(name, needs, capacity, pools)
  call(needs > 0 and 'HSET' or 'HSETNX', keys.budgets_wanted, name, format('%d %d %s', needs, capacity, pools))
end

-- The part of a budget that this pool has, and what leaks of it a second, and what is unused in other pools. 'division'
-- has its name, the part that the pool begins with, and the pools. Also whether it was allotted of this amount.
local function divided(division, amount)
  local name, part_texts = division[1], kept.part_texts -- false where there is none
  if part_texts[name] == nil then
    part_texts[name] = call('HGET', keys.budgets_allotted, name)
  end
  local part, is_right, _, rest = part_of(part_texts[name], amount, division[2])
  return part, part / 60, rest, is_right
end

return { part_of = part_of, want = want, divided = divided }
