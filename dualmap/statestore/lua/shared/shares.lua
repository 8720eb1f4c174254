-- The work of tenants in their books (scheduling/tenants/shares.py), and where one stands among the others by it. A
-- sorted set lists the active tenants by when they were last seen.
local books = require('shared.books')
local SENT, GIVEN, WEIGHT = books.SENT, books.GIVEN, books.WEIGHT
local SEEN, HELD, RAISED = books.SEEN, books.HELD, books.RAISED
local kept, add_tenant, left_after, read_books = books.kept, books.add_tenant, books.left_after, books.read_books
local ipairs, unpack = ipairs, unpack
local call, format, ceil, log, max, min = redis.call, string.format, math.ceil, math.log, math.max, math.min

local SEEN_EVERY_MS = 1000

-- Until its end (shared/book_end.lua) a call keeps the tenants that it saw, as time, name, …; and what instances were
-- given of tenants, as name, work, the memory that is held from then on, ….
local tenants_seen, work_given

-- A tenant's level, whether it is within its share while others are active, its share in seconds, and where it stands
-- if it is above that. scheduling/tenants/shares.py says what levels mean, and why they are computed here.
local function level_of(book, weight, instances)
  local weights = kept.weights - book[WEIGHT] + weight
  local part = weight / weights
  local fair = max(instances, kept.given / terms.share_given_s) * terms.share_sent_s * part
  if weights <= 1.001 * weight then
    return 0, false, fair
  elseif book[SENT] <= fair then
    return 0, true, fair
  end
  local stands = max(book[GIVEN] + book[RAISED], kept.leads * weight - fair, 1e-9)
  local above = log(stands / (terms.share_from * max(kept.given, 1e-9) * part)) / log(terms.share_step)
  return min(terms.share_levels - 1, 1 + max(0, ceil(above))), false, fair, stands
end

local function enter_work(book, sent, given, held)
  local held_before = book[HELD]
  held = max(-held_before, held) -- what is not in the book cannot be freed
  book[1], book[SENT], book[GIVEN], book[HELD] = true, book[SENT] + sent, book[GIVEN] + given, held_before + held
  kept.given, kept.held, kept.has_sums, kept.has_changes = kept.given + given, max(0, kept.held + held), true, true
end

-- Enters what a placement of a tenant sent, and gave at once, the part of an instance's memory that it then holds, and
-- where the tenant stood if that was above its share.
local function send_work(book, name, weight, sent, given, held, stood, at_ms)
  kept.weights, book[WEIGHT] = kept.weights - book[WEIGHT] + weight, weight
  if stood then
    book[RAISED], kept.leads = max(0, stood - book[GIVEN]), stood / weight
  end
  local past_ms = at_ms - book[SEEN]
  if not (past_ms < SEEN_EVERY_MS and past_ms > -SEEN_EVERY_MS) then
    tenants_seen = tenants_seen or {}
    book[SEEN], tenants_seen[#tenants_seen + 1], tenants_seen[#tenants_seen + 2] = at_ms, at_ms, name
  end
  enter_work(book, sent, given, held)
end

-- Enters, at the end of the call, work that an instance was given of an active tenant, and the part of its memory that
-- the tenant's contexts hold from now on.
local function give_work(name, work_s, held)
  if not name or name == '' then
    return
  elseif not work_given then
    work_given, kept.has_ends = { name, work_s, held }, true
  else
    local last = #work_given
    work_given[last + 1], work_given[last + 2], work_given[last + 3] = name, work_s, held
  end
end

-- Enters that a context no longer holds the part of the memory that it held for so long.
local function free_memory(name, part, ms)
  give_work(name, 0, -part * left_after(ms, terms.share_held_s))
end

-- Adds the names of the books in which work is entered at the end of the call.
local function add_names_at_end(names)
  for first = 1, work_given and #work_given or 0, 3 do
    add_tenant(names, work_given[first])
  end
end

-- Enters the work that instances were given, once the books are read.
local function enter_given_work()
  for first = 1, work_given and #work_given or 0, 3 do
    local book = kept.books[work_given[first]]
    if book[WEIGHT] > 0 then
      enter_work(book, 0, work_given[first + 1], work_given[first + 2])
    end
  end
  work_given = nil
end

-- Forgets the work of tenants that were not active for long, at most so many at a time.
local function forget_inactive(most, at_ms)
  local names, before = {}, format('(%d', at_ms - terms.share_active_ms)
  local found = call('ZRANGEBYSCORE', keys.shares_active, '-inf', before, 'LIMIT', 0, most)
  for _, name in ipairs(found) do
    add_tenant(names, name)
  end
  read_books(names, at_ms)
  for _, name in ipairs(found) do
    local book = kept.books[name]
    kept.weights, kept.held = max(0, kept.weights - book[WEIGHT]), max(0, kept.held - book[HELD])
    book[1], book[SENT], book[GIVEN], book[WEIGHT], book[HELD], book[RAISED] = true, 0, 0, 0, 0, 0
    call('ZREM', keys.shares_active, name)
  end
end

-- Lists the tenants that this call saw as active.
local function list_active(at_ms)
  if tenants_seen then
    call('ZADD', keys.shares_active, unpack(tenants_seen))
    forget_inactive(#tenants_seen, at_ms)
    tenants_seen = nil
  end
end

return {
  level_of = level_of,
  send_work = send_work,
  give_work = give_work,
  free_memory = free_memory,
  add_names_at_end = add_names_at_end,
  enter_given_work = enter_given_work,
  list_active = list_active,
}
