-- Budgets of tenants (scheduling/tenants/budgets.py): in one hash, by name. One that leaks is 'USED AT_MS', millionths of what was
-- used of it at that time, of which some has leaked since; a quota is 'USED PERIOD', the day or month that it counts in; of what is
-- in flight it is 'USED'. One that is missing, or cannot be read, is not used. Another hash has the parts of this pool in budgets
-- that are divided among pools (scheduling/tenants/allotments.py), as 'PART OF STAMP REST': its part of an amount, the stamp of that
-- change, and the amount that was unused in other pools then.

-- The amount that is used now of a budget, by its text; and the period that a quota counts in now, nil for others.
local function used_of(text, leak, at_ms)
  if leak == 'day' or leak == 'month' then
    local period = leak == 'day' and utc_day(at_ms) or string.sub(utc_day(at_ms), 1, 7)
    local former, of = string.match(text or '', '^(%d+) (%S+)$')
    return of == period and tonumber(former) or 0, period
  elseif leak > 0 then
    local former, since_ms = string.match(text or '', '^(%d+) (%d+)$')
    return former and math.max(0, former / 1000000 - math.max(0, at_ms - since_ms) / 1000 * leak) or 0
  end
  return tonumber(text or 0) or 0
end

local function budget_text(used, leak, period, at_ms)
  if period then
    return string.format('%d %s', used, period)
  end
  return leak > 0 and string.format('%d %d', math.ceil(used * 1000000), at_ms) or used
end

-- The part of a budget of this amount that a pool has, by its text: what it begins with where nothing is allotted. Also whether it
-- was allotted of this amount, the stamp, and what other pools had left.
local function part_of(text, amount, begins_with)
  local part, of, stamp, rest = string.match(text or '', '^(%d+) (%d+) (%d+) (%d+)$')
  if not part or tonumber(of) == 0 then
    return begins_with, false, 0, amount - begins_with
  end
  part, of = tonumber(part), tonumber(of)
  return of == amount and part or math.floor(part * amount / of), of == amount, tonumber(stamp), tonumber(rest)
end

-- The leak of a part. It is above 0 for a part that is 0, too.
local function part_of_leak(leak, part, amount)
  return type(leak) == 'number' and leak * math.max(part, terms.least_part) / amount or leak
end

-- Tells the leader that a request did not fit into the part of this pool, or that there is little left of it.
local function want(name, needs, capacity, pools)
  redis.call(needs > 0 and 'HSET' or 'HSETNX', keys.budgets_wanted, name, string.format('%d %d %s', needs, capacity, pools))
end

-- A call keeps the texts of budgets and of parts that it has read, by name; the budgets that were drawn from, as {used, leak, period},
-- by name; the names of those that it changed; and what requests give back, as name, amount, time of the draw, name, …
local budget_texts, part_texts, budgets_now, budgets_changed, given_back = {}, {}, {}, {}, {}

-- Enters the texts of a hash at some names in a table.
local function read_texts(key, names, texts)
  local found = names[1] and redis.call('HMGET', key, unpack(names)) or {}
  for place, name in ipairs(names) do
    texts[name] = found[place]
  end
end

-- Reads all that is needed to weigh the draws of some requests.
local function read_budgets(all_draws)
  local names, divided = {}, {}
  for _, draws in ipairs(all_draws) do
    for first = 1, #draws, 4 do
      local name = draws[first]
      if budget_texts[name] == nil then
        budget_texts[name], names[#names + 1] = false, name
      end
      if type(draws[first + 3]) == 'table' and part_texts[name] == nil then
        part_texts[name], divided[#divided + 1] = false, name
      end
    end
  end
  read_texts(keys.budgets, names, budget_texts)
  read_texts(keys.budgets_allotted, divided, part_texts)
end

-- Compares the draws {name, cost, capacity, leak per second or 'day' or 'month', name, …} with their budgets: {'PLACE BEYOND PART
-- REST …' of those that do not fit; what is left of each}. A draw at a place lacks the amount BEYOND, its pool may use PART, and REST
-- is unused in other pools, or -1 where the budget is not divided. Where it is, the leak is {leak, part that this pool begins with,
-- pools}, and what is left of it 'LEFT PART'.
local function weigh_draws(draws, must, at_ms)
  local found = { '' }
  for place = 1, #draws / 4 do
    local name, cost, capacity, leak = draws[4 * place - 3], draws[4 * place - 2], draws[4 * place - 1], draws[4 * place]
    local divided, amount, rest, is_right = type(leak) == 'table' and leak, capacity, nil, true
    if divided then
      local part, of_amount, _, unused = part_of(part_texts[name], amount, divided[2])
      capacity, is_right, rest = part, of_amount, unused
      leak = part_of_leak(divided[1], capacity, amount)
    end
    local budget = budgets_now[name]
    if not budget then
      budget = { leak = leak }
      budget.used, budget.period = used_of(budget_texts[name], leak, at_ms)
      budgets_now[name] = budget
    end
    local used = budget.used + cost
    if used > capacity and not must then
      found[1] = found[1] .. string.format('%d %.17g %d %d ', place, used - capacity, capacity, rest or -1)
    end
    if divided and (not is_right or used > terms.wanted_from * capacity) then
      want(name, used > capacity and not must and cost or 0, amount, divided[3])
    end
    local left = math.floor(capacity - used)
    found[place + 1] = divided and string.format('%d %d', left, capacity) or left
  end
  return found
end

-- Draws what was weighed.
local function draw(draws)
  for first = 1, #draws, 4 do
    local budget = budgets_now[draws[first]]
    budget.used = budget.used + draws[first + 1]
    if not budget.is_changed then
      budget.is_changed, budgets_changed[#budgets_changed + 1] = true, draws[first]
    end
  end
end

-- Takes from budgets what 'NAME AMOUNT …' says, drawn at a time. 'NAME -AMOUNT:LEAK_PER_S' adds, and what has leaked away before
-- is no credit for it; where the budget is divided, '/CAPACITY' follows, of which that leaks.
local function give_back(returned, drawn_ms)
  for name, amount in string.gmatch(returned, '(%S+) (%S+)') do
    local place = #given_back
    given_back[place + 1], given_back[place + 2], given_back[place + 3] = name, amount, drawn_ms
  end
end

-- Takes one amount from a budget that was read as {used, rest of its text, units in one of its amounts}.
local function take(budget, name, amount, drawn_ms, at_ms)
  local less, leaked = tonumber(amount), 0
  if not less then
    local extra, leak, of = string.match(amount, '^%-(%d+):([%d.e+-]+)/?(%d*)$')
    less, leak, of = -(tonumber(extra) or 0), tonumber(leak) or 0, tonumber(of)
    if of then
      leak = part_of_leak(leak, part_of(redis.call('HGET', keys.budgets_allotted, name), of, of), of)
    end
    leaked = budget.units > 1 and extra and math.max(0, at_ms - (tonumber(budget.rest) or at_ms)) * leak * 1000 or 0
  end
  if budget.period and budget.period ~= string.sub(utc_day(drawn_ms), 1, #budget.period) then
    return -- of another period
  end
  budget.used, budget.is_changed = math.max(leaked, budget.used) - less * budget.units, true
  budget.used = math.max(0, budget.used)
end

-- The budgets of names, as take changes them; none that is not used, or cannot be read.
local function budgets_of(names)
  local texts, found = {}, {}
  read_texts(keys.budgets, names, texts)
  for _, name in ipairs(names) do
    local used, rest = string.match(texts[name] or '', '^(%d+)(.*)$')
    if used then
      local period = string.find(rest, '-', 1, true) and string.sub(rest, 2)
      found[name] = { used = tonumber(used), rest = rest, period = period, units = (period or rest == '') and 1 or 1000000 }
    end
  end
  return found
end

-- Enters what requests gave back.
local function take_given_back(at_ms)
  if not given_back[1] then
    return
  end
  local names, is_named = {}, {}
  for first = 1, #given_back, 3 do
    local name = given_back[first]
    if not is_named[name] then
      names[#names + 1], is_named[name] = name, true
    end
  end
  local budgets, written, unused = budgets_of(names), {}, {}
  for first = 1, #given_back, 3 do
    local budget = budgets[given_back[first]]
    if budget then
      take(budget, given_back[first], given_back[first + 1], given_back[first + 2], at_ms)
    end
  end
  for _, name in ipairs(names) do
    local budget = budgets[name]
    if budget and budget.is_changed and budget.used > 0 then
      written[#written + 1], written[#written + 2] = name,
        budget.rest == '' and budget.used or string.format('%d%s', budget.used, budget.rest)
    elseif budget and budget.is_changed then
      unused[#unused + 1] = name
    end
  end
  if written[1] then
    redis.call('HSET', keys.budgets, unpack(written))
  end
  if unused[1] then
    redis.call('HDEL', keys.budgets, unpack(unused))
  end
end

-- Writes the budgets that this call drew from, at its end.
local function write_budgets(at_ms)
  if not budgets_changed[1] then
    return
  end
  local written = {}
  for _, name in ipairs(budgets_changed) do
    local budget = budgets_now[name]
    written[#written + 1], written[#written + 2] = name, budget_text(budget.used, budget.leak, budget.period, at_ms)
  end
  redis.call('HSET', keys.budgets, unpack(written))
end
