-- Books of tenants' work (scheduling/tenants/shares.py): in one hash, by name, 'SENT GIVEN AT_MS WEIGHT SEEN_MS', seconds of
-- an instance as they are at that time. They decay. '*' has 'GIVEN AT_MS WEIGHT', the sums over the active ones, which a
-- sorted set lists by when they were last seen to place a request, to a second.
local SEEN_EVERY_MS = 1000

-- The part of what was entered at one time that is left at another one.
local function left_of(since_ms, at_ms)
  return math.exp(-math.max(0, at_ms - since_ms) / 1000 / terms.share_window_s)
end

-- The books of one tenant, as they are by now.
local function read_shares(name, at_ms)
  local texts = redis.call('HMGET', keys.shares, name, '*')
  local sent, given, since_ms, weight, seen_ms = string.match(texts[1] or '', '^(%S+) (%S+) (%d+) (%S+) (%d+)$')
  local all, all_since_ms, weights = string.match(texts[2] or '', '^(%S+) (%d+) (%S+)$')
  local books = { name = name, sent = tonumber(sent or 0) or 0, given = tonumber(given or 0) or 0, weight = tonumber(weight or 0) or 0,
    seen_ms = tonumber(seen_ms or 0), all = tonumber(all or 0) or 0, weights = tonumber(weights or 0) or 0 }
  local left, all_left = left_of(tonumber(since_ms or at_ms), at_ms), left_of(tonumber(all_since_ms or at_ms), at_ms)
  books.sent, books.given, books.all = books.sent * left, books.given * left, books.all * all_left
  return books
end

-- A tenant's level, whether it is within its share while others are active, and its share in seconds. scheduling/tenants/shares.py
-- says what levels mean, and why they are computed here.
local function level_of(books, share)
  local weights = books.weights - books.weight + share.weight
  local fair = math.max(share.instances * terms.share_window_s, books.all) * share.weight / weights
  if weights <= 1.001 * share.weight then
    return 0, false, fair
  elseif books.sent <= fair then
    return 0, true, fair
  end
  local above = math.log(math.max(books.given, 1e-9) / (terms.share_from * fair)) / math.log(terms.share_step)
  return math.min(terms.share_levels - 1, 1 + math.max(0, math.ceil(above))), false, fair
end

-- Forgets the books of tenants that were not active for long, at most two at a time.
local function forget_inactive(books, at_ms)
  local first = redis.call('ZRANGE', keys.shares_active, 0, 1, 'WITHSCORES')
  for place = 1, #first, 2 do
    if first[place + 1] + terms.share_active_ms < at_ms then
      local weight = string.match(redis.call('HGET', keys.shares, first[place]) or '', ' (%S+) %d+$')
      books.weights = math.max(0, books.weights - (tonumber(weight or 0) or 0))
      redis.call('HDEL', keys.shares, first[place])
      redis.call('ZREM', keys.shares_active, first[place])
    end
  end
end

local function enter_shares(books, sent, given, at_ms)
  redis.call('HSET', keys.shares,
    books.name, string.format('%.6g %.6g %d %.6g %d', books.sent + sent, books.given + given, at_ms, books.weight, books.seen_ms),
    '*', string.format('%.6g %d %.6g', books.all + given, at_ms, books.weights))
end

-- Enters what a placement sent, and gave at once.
local function write_shares(books, share, sent, given, at_ms)
  books.weights, books.weight = books.weights - books.weight + share.weight, share.weight
  if math.abs(at_ms - books.seen_ms) >= SEEN_EVERY_MS then
    books.seen_ms = at_ms
    redis.call('ZADD', keys.shares_active, at_ms, books.name)
    forget_inactive(books, at_ms)
  end
  enter_shares(books, sent, given, at_ms)
end

-- Enters work that an instance was given of an active tenant, and what of it was not known when it was sent.
local function give_work(name, work_s, sent_s, at_ms)
  if not name or name == '' then
    return
  end
  local books = read_shares(name, at_ms)
  if books.weight > 0 then
    enter_shares(books, sent_s, work_s, at_ms)
  end
end
