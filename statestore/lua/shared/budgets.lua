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

-- Compares the draws {name, cost, capacity, leak per second or 'day' or 'month', name, …} with their budgets: {'PLACE BEYOND PART
-- REST …' of those that do not fit; what is left of each}, and what is to be written where all fit, or must be drawn all the same.
-- A draw at a place lacks the amount BEYOND, its pool may use PART, and REST is unused in other pools, or -1 where the budget is
-- not divided. Where it is, the leak is {leak, part that this pool begins with, pools}, and what is left of it 'LEFT PART'.
local function weigh_draws(draws, must, at_ms)
  local names, found, written, parts = {}, { '' }, {}, nil
  for place = 1, #draws / 4 do
    names[place] = draws[4 * place - 3]
  end
  local texts = redis.call('HMGET', keys.budgets, unpack(names))
  for place = 1, #names do
    local name, cost, capacity, leak = names[place], draws[4 * place - 2], draws[4 * place - 1], draws[4 * place]
    local divided, amount, rest, is_right = type(leak) == 'table' and leak, capacity, nil, true
    if divided then
      parts = parts or redis.call('HMGET', keys.budgets_allotted, unpack(names))
      local part, of_amount, _, unused = part_of(parts[place], amount, divided[2])
      capacity, is_right, rest = part, of_amount, unused
      leak = part_of_leak(divided[1], capacity, amount)
    end
    local used, period = used_of(texts[place], leak, at_ms)
    used = used + cost
    written[2 * place - 1], written[2 * place] = name, budget_text(used, leak, period, at_ms)
    if used > capacity and not must then
      found[1] = found[1] .. string.format('%d %.17g %d %d ', place, used - capacity, capacity, rest or -1)
    end
    if divided and (not is_right or used > terms.wanted_from * capacity) then
      want(name, used > capacity and not must and cost or 0, amount, divided[3])
    end
    local left = math.floor(capacity - used)
    found[place + 1] = divided and string.format('%d %d', left, capacity) or left
  end
  return found, written
end

-- Takes from budgets what 'NAME AMOUNT …' says, drawn at a time. 'NAME -AMOUNT:LEAK_PER_S' adds, and what has leaked away before
-- is no credit for it; where the budget is divided, '/CAPACITY' follows, of which that leaks.
local function give_back(returned, drawn_ms, at_ms)
  local names, amounts, written, unused = {}, {}, {}, {}
  for name, amount in string.gmatch(returned, '(%S+) (%S+)') do
    names[#names + 1], amounts[#names + 1] = name, amount
  end
  if #names == 0 then
    return -- nothing, or it was changed by hand
  end
  local texts = redis.call('HMGET', keys.budgets, unpack(names))
  for place = 1, #names do
    local amount, extra, leak, of = tonumber(amounts[place]), nil, nil, nil
    if not amount then
      extra, leak, of = string.match(amounts[place], '^%-(%d+):([%d.e+-]+)/?(%d*)$')
      amount, of = -(tonumber(extra) or 0), tonumber(of)
      if of then
        local part = part_of(redis.call('HGET', keys.budgets_allotted, names[place]), of, of)
        leak = part_of_leak(tonumber(leak) or 0, part, of)
      end
    end
    local former, rest = string.match(texts[place] or '', '^(%d+)(.*)$')
    local left = former and former - amount
    if former and string.find(rest, '-', 1, true) then
      if rest == ' ' .. string.sub(utc_day(drawn_ms), 1, #rest - 1) then
        rest = string.format('%d%s', left, rest)
      else
        left = nil -- of another period
      end
    elseif former and rest ~= '' then
      left = former - amount * 1000000
      if extra then
        local leaked = math.max(0, at_ms - (tonumber(rest) or at_ms)) * (tonumber(leak) or 0) * 1000
        left = math.max(left, leaked - amount * 1000000)
      end
      rest = string.format('%d%s', left, rest)
    else
      rest = left
    end
    if left and left > 0 then
      written[#written + 1], written[#written + 2] = names[place], rest
    elseif left then
      unused[#unused + 1] = names[place]
    end
  end
  if #written > 0 then
    redis.call('HSET', keys.budgets, unpack(written))
  end
  if #unused > 0 then
    redis.call('HDEL', keys.budgets, unpack(unused))
  end
end
