-- Budgets of tenants (scheduling/tenants/budgets.py): in one hash, by name. One that leaks is 'USED AT_MS', millionths of what was
-- used of it at that time, of which some has leaked since; a quota is 'USED PERIOD', the day or month that it counts in; of what is
-- in flight it is 'USED'. One that is missing, or cannot be read, is not used.

-- Compares the draws {name, cost, capacity, leak per second or 'day' or 'month', name, …} with their budgets: {draw that does not
-- fit and takes longest to, or 0; ms until it would; what is left of each}, and what is to be written where all fit, or must be
-- drawn all the same.
local function weigh_draws(draws, must, at_ms)
  local names, found, written = {}, { 0, 0 }, {}
  for place = 1, #draws / 4 do
    names[place] = draws[4 * place - 3]
  end
  local texts = redis.call('HMGET', keys.budgets, unpack(names))
  for place = 1, #names do
    local text, used, capacity, leak = texts[place], draws[4 * place - 2], draws[4 * place - 1], draws[4 * place]
    written[2 * place - 1] = names[place]
    if leak == 'day' or leak == 'month' then
      local period = leak == 'day' and utc_day(at_ms) or string.sub(utc_day(at_ms), 1, 7)
      local former, of = string.match(text or '', '^(%d+) (%S+)$')
      used, leak = of == period and used + former or used, 0
      written[2 * place] = string.format('%d %s', used, period)
    elseif leak > 0 then
      local former, since_ms = string.match(text or '', '^(%d+) (%d+)$')
      if former then
        used = used + math.max(0, former / 1000000 - math.max(0, at_ms - since_ms) / 1000 * leak)
      end
      written[2 * place] = string.format('%d %d', math.ceil(used * 1000000), at_ms)
    else
      used = used + (tonumber(text or 0) or 0)
      written[2 * place] = used
    end
    if used > capacity and not must then
      local wait_ms = leak > 0 and math.ceil((used - capacity) * 1000 / leak) or 0
      if found[1] == 0 or wait_ms > found[2] then
        found[1], found[2] = place, wait_ms
      end
    end
    found[place + 2] = math.floor(capacity - used)
  end
  return found, written
end

-- Takes from budgets what 'NAME AMOUNT …' says, drawn at a time. 'NAME -AMOUNT:LEAK_PER_S' adds, and what has leaked away before
-- is no credit for it.
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
    local amount, extra, leak = tonumber(amounts[place]), nil, nil
    if not amount then
      extra, leak = string.match(amounts[place], '^%-(%d+):([%d.e+-]+)$')
      amount = -(tonumber(extra) or 0)
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
