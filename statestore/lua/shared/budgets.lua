-- Budgets of tenants (scheduling/tenants/budgets.py): in one hash, by name, 'USED AT_MS LEAK_PER_S PERIOD', what was used of it
-- at that time and leaks away since. A quota counts in one period only, which a draw names behind its name: 'NAME#PERIOD'. One
-- that is missing, or cannot be read, is not used.

-- What is used of it by now, and what leaks a second; nil where what was written is of another period.
local function used_of(text, period, at_ms)
  local used, since_ms, leak_per_s, of = string.match(text or '', '^(%S+) (%d+) (%S+) ?(%S*)$')
  if not (tonumber(used) and tonumber(leak_per_s)) or of ~= period then
    return nil
  end
  return math.max(0, used - math.max(0, at_ms - since_ms) / 1000 * leak_per_s), tonumber(leak_per_s)
end

local function budget_text(used, at_ms, leak_per_s, period)
  return string.format('%.17g %d %.17g %s', used, at_ms, leak_per_s, period)
end

-- What the draws {name, cost, capacity, leak per second} make of their budgets: {draw that does not fit and takes longest to,
-- or 0; ms until it would; what is left of each}, and what is to be written where all fit, or must be drawn all the same.
local function weigh_draws(draws, must, at_ms)
  local names, periods, found, written = {}, {}, { 0, 0 }, {}
  for place, draw in ipairs(draws) do
    names[place], periods[place] = string.match(draw[1], '^([^#]*)#?(.*)$')
  end
  for place, text in ipairs(redis.call('HMGET', keys.budgets, unpack(names))) do
    local _, cost, capacity, leak_per_s = unpack(draws[place])
    local used = used_of(text, periods[place], at_ms) or 0
    local over = used + cost - capacity
    if over > 0 and not must then
      local wait_ms = leak_per_s > 0 and math.ceil(over * 1000 / leak_per_s) or 0
      if found[1] == 0 or wait_ms > found[2] then
        found[1], found[2] = place, wait_ms
      end
    end
    found[place + 2] = math.floor(capacity - used - cost)
    written[2 * place - 1] = names[place]
    written[2 * place] = budget_text(used + cost, at_ms, leak_per_s, periods[place])
  end
  return found, written
end

-- Gives back what a request drew, 'NAME COST …', but for what it keeps, 'KEPT …', or '' for nothing.
local function give_back(drawn, kept, at_ms)
  local names, periods, costs, written, unused = {}, {}, {}, {}, {}
  for name, period, cost in string.gmatch(drawn, '([^#%s]+)#?(%S*) (%S+)') do
    names[#names + 1], periods[#names + 1], costs[#names + 1] = name, period, tonumber(cost) or 0
  end
  if #names == 0 then
    return -- somebody changed it by hand
  end
  local keeps = string.gmatch(kept, '%S+')
  for place, text in ipairs(redis.call('HMGET', keys.budgets, unpack(names))) do
    local keep, used, leak_per_s = keeps(), used_of(text, periods[place], at_ms)
    local left = math.max(0, (used or 0) - costs[place] + (keep and tonumber(keep) or 0))
    if used and left > 0 then
      written[#written + 1] = names[place]
      written[#written + 1] = budget_text(left, at_ms, leak_per_s, periods[place])
    elseif used then
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
