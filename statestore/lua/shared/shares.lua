-- Books of tenants' work (scheduling/tenants/shares.py): in one hash, by name, 'SENT GIVEN AT_MS WEIGHT SEEN_MS', seconds of
-- an instance as they are at that time. They decay. '*' has 'GIVEN AT_MS WEIGHT', the sums over the active ones, which a
-- sorted set lists by when they were last seen to place a request, to a second.
local SEEN_EVERY_MS = 1000

-- Seconds as whole microseconds, which are written and sent at a third of the cost of a fraction. What somebody damaged is bounded.
local function microseconds(seconds)
  return math.floor(math.max(-1e9, math.min(1e9, seconds)) * 1000000)
end

-- The part of what was entered at one time that is left at another one.
local function left_of(since_ms, at_ms)
  return math.exp(-math.max(0, at_ms - since_ms) / 1000 / terms.share_window_s)
end

-- A call keeps the books that it has read, as they are by now: those of tenants by name, and the sums. It also keeps the tenants
-- whose books it changed, those that it saw, and what instances were given of tenants whose books it has not read yet.
local share_books, share_sums, shares_changed, shares_seen, work_given = {}, nil, {}, {}, {}

-- Reads the books of tenants.
local function read_shares(names, at_ms)
  local texts = redis.call('HMGET', keys.shares, '*', unpack(names))
  local all, all_since_ms, weights = string.match(texts[1] or '', '^(%S+) (%d+) (%S+)$')
  share_sums = { given = (tonumber(all or 0) or 0) * left_of(tonumber(all_since_ms or at_ms), at_ms), weights = tonumber(weights or 0) or 0 }
  for place, name in ipairs(names) do
    local sent, given, since_ms, weight, seen_ms = string.match(texts[place + 1] or '', '^(%S+) (%S+) (%d+) (%S+) (%d+)$')
    local left = left_of(tonumber(since_ms or at_ms), at_ms)
    share_books[name] = { name = name, sent = (tonumber(sent or 0) or 0) * left, given = (tonumber(given or 0) or 0) * left,
      weight = tonumber(weight or 0) or 0, seen_ms = tonumber(seen_ms or 0) }
  end
end

-- A tenant's level, whether it is within its share while others are active, and its share in seconds. scheduling/tenants/shares.py
-- says what levels mean, and why they are computed here.
local function level_of(books, share)
  local weights = share_sums.weights - books.weight + share.weight
  local fair = math.max(share.instances * terms.share_window_s, share_sums.given) * share.weight / weights
  if weights <= 1.001 * share.weight then
    return 0, false, fair
  elseif books.sent <= fair then
    return 0, true, fair
  end
  local above = math.log(math.max(books.given, 1e-9) / (terms.share_from * fair)) / math.log(terms.share_step)
  return math.min(terms.share_levels - 1, 1 + math.max(0, math.ceil(above))), false, fair
end

local function enter_work(books, sent, given)
  books.sent, books.given, share_sums.given = books.sent + sent, books.given + given, share_sums.given + given
  if not books.is_changed then
    books.is_changed, shares_changed[#shares_changed + 1] = true, books
  end
end

-- Enters what a placement sent, and gave at once.
local function send_work(books, share, sent, given, at_ms)
  share_sums.weights, books.weight = share_sums.weights - books.weight + share.weight, share.weight
  if math.abs(at_ms - books.seen_ms) >= SEEN_EVERY_MS then
    books.seen_ms, shares_seen[#shares_seen + 1], shares_seen[#shares_seen + 2] = at_ms, at_ms, books.name
  end
  enter_work(books, sent, given)
end

-- Enters work that an instance was given of an active tenant, and what of it was not known when it was sent.
local function give_work(name, work_s, sent_s)
  if name and name ~= '' then
    local former = work_given[name] or { 0, 0 }
    work_given[name] = { former[1] + work_s, former[2] + sent_s }
  end
end

-- Forgets the books of tenants that were not active for long, at most so many at a time.
local function forget_inactive(most, at_ms)
  local first = redis.call('ZRANGE', keys.shares_active, 0, most - 1, 'WITHSCORES')
  for place = 1, #first, 2 do
    if first[place + 1] + terms.share_active_ms < at_ms then
      local weight = string.match(redis.call('HGET', keys.shares, first[place]) or '', ' (%S+) %d+$')
      share_sums.weights = math.max(0, share_sums.weights - (tonumber(weight or 0) or 0))
      redis.call('HDEL', keys.shares, first[place])
      redis.call('ZREM', keys.shares_active, first[place])
    end
  end
end

-- Writes the books that this call changed, at its end.
local function write_shares(at_ms)
  if not shares_changed[1] and next(work_given) == nil then
    return
  end
  local names = {}
  for name in pairs(work_given) do
    names[#names + 1] = name
  end
  if names[1] then
    read_shares(names, at_ms)
  end
  for _, name in ipairs(names) do
    if share_books[name].weight > 0 then
      enter_work(share_books[name], work_given[name][2], work_given[name][1])
    end
  end
  if shares_seen[1] then
    redis.call('ZADD', keys.shares_active, unpack(shares_seen))
    forget_inactive(#shares_seen, at_ms)
  end
  local texts = {}
  for _, books in ipairs(shares_changed) do
    texts[#texts + 1], texts[#texts + 2] = books.name,
      string.format('%de-6 %de-6 %d %.6g %d', microseconds(books.sent), microseconds(books.given), at_ms, books.weight, books.seen_ms)
  end
  if texts[1] then
    redis.call('HSET', keys.shares, '*', string.format('%de-6 %d %.6g', microseconds(share_sums.given), at_ms, share_sums.weights), unpack(texts))
  end
end
