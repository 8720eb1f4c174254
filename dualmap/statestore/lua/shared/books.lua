-- Books of tenants: in one hash, one for each tenant, and one for each of its keys and models that have limits. A book is packed
-- (statestore/pool/codec.py): seven doubles, then for each budget in it a byte and two doubles.
--
-- The doubles are the tenant's work (scheduling/tenants/shares.py): what it sent and what instances were given of it, seconds of an
-- instance, the time in ms at which that was so, its weight, when it was last seen to place a request, to a second, the part of an instance's
-- memory that its contexts hold from then on, and what is added to the work that it was given, as it came back. Work decays. '*' has
-- the sums over the active tenants: what was given, when, the weights, the memory held, and where the last one above its share stands,
-- by weight. A sorted set lists these tenants by when they were last seen.
--
-- A budget (scheduling/tenants/budgets.py) is the kind of its limit, the amount that was used, and since when: the time in ms of one that
-- leaks, of which some has leaked since; the day or month of a quota; 0 of what is in flight. One that is missing, or cannot be read, is
-- not used. Another hash has the parts of this pool in budgets that are divided among pools (scheduling/tenants/allotments.py), by their
-- names, as 'PART OF STAMP REST': its part of an amount, the stamp of that change, and the amount that was unused in other pools then.
--
-- Draws are packed too (BudgetGroup.packed): for each book their number and its name, then for each the kind, an amount, and that of the
-- limit. Where a budget is divided, terms.divided is added to its kind.

-- Kinds of limits, in order of their numbers, from 0; four have one measure.
local KINDS = terms.budget_kinds

-- The period of a kind is the rest of the division of its number by 4.
local MINUTE = 0

local DAY = 1

local IN_FLIGHT = 3

-- Where a book that was read has what: whether it was changed is first, and of a budget what is used and since when follow its kind.
local SENT = 2

local GIVEN = 3

local AT = 4

local WEIGHT = 5

local SEEN = 6

local HELD = 7

local RAISED = 8

local BUDGETS = 9

local SEEN_EVERY_MS = 1000

-- Formats of books with so many budgets.
local BOOK_FORMATS = {}

-- Formats of so many doubles.
local DOUBLES_FORMATS = {}

local function format_of(formats, first, each, number)
  local format = formats[number]
  if not format then
    format = first .. string.rep(each, number)
    formats[number] = format
  end
  return format
end

-- The number of the period of a quota at a time.
local function period_at(kind, at_ms)
  return kind % 4 == DAY and math.floor(at_ms / 86400000) or utc_month(at_ms)
end

-- A call keeps the books that it has read, by name, true while they are read; the sums of work, nil until it is read, of weights
-- and of the memory held, and where the last tenant above its share stands, by weight; whether any book is changed, and the sums are;
-- and the texts of parts, by the name of the budget, false where there is none.
local books, all_given, all_weights, all_held, all_leads = {}, nil, 0, 0, 0

local has_changes, has_sums, part_texts = false, false, {}

-- Until its end it keeps the tenants that it saw, as time, name, …; what instances were given of tenants, as name, work, the
-- memory that is held from then on, …; and what requests give back, as draws, their time, ….
local tenants_seen, work_given, given_back = nil, nil, nil

-- The draws that were weighed last, as book, place of what is used there, amount, book, …, nil.
local WEIGHED = {}

-- The amounts that were used then, and of each budget that is divided, behind them, the part and the rest.
local FOUND = {}

-- A sum of work that can be read: somebody may have damaged it.
local function readable(work_s)
  return work_s > 0 and work_s < terms.most_work_s and work_s or 0
end

-- The part of what was entered that is left after a time.
local function left_after(ms, window_s)
  return ms > 0 and math.exp(-ms / 1000 / window_s) or 1
end

-- The work of a book after a time in which memory was held: what is left of it, and of what the memory adds meanwhile.
local function grown(work, held, ms, window_s)
  local left = left_after(ms, window_s)
  if held == 0 then
    return work * left
  end
  return work * left + held * (left_after(ms, terms.share_held_s) - left) / (1 / window_s - 1 / terms.share_held_s)
end

-- The book of a text, as it is at a time.
local function book_from(text, at_ms)
  local number = text and (#text - terms.work_bytes) / terms.budget_bytes or -1
  if number < 0 or number % 1 ~= 0 or number > #KINDS then
    return { false, 0, 0, at_ms, 0, 0, 0, 0 }
  end
  local book = { false, struct.unpack(format_of(BOOK_FORMATS, terms.work, 'Bdd', number), text) }
  book[BUDGETS + 3 * number] = nil -- the place behind what was unpacked
  if book[WEIGHT] > 0 then
    local ms, held = at_ms - book[AT], readable(book[HELD])
    book[SENT] = grown(readable(book[SENT]), held, ms, terms.share_sent_s)
    book[GIVEN] = grown(readable(book[GIVEN]), held, ms, terms.share_given_s)
    book[HELD] = held * left_after(ms, terms.share_held_s)
    book[RAISED] = readable(book[RAISED]) * left_after(ms, terms.share_given_s)
  else
    book[SENT], book[GIVEN], book[WEIGHT], book[HELD], book[RAISED] = 0, 0, 0, 0, 0
  end
  book[AT] = at_ms
  return book
end

-- Reads books; with them the sums, where a name is '*'.
local function read_books(names, at_ms)
  for place, text in ipairs(names[1] and redis.call('HMGET', keys.books, unpack(names)) or names) do
    local name = names[place]
    if name ~= '*' then
      books[name] = book_from(text, at_ms)
    elseif text and #text == terms.all_work_bytes then
      local given, since_ms, weights, held, leads = struct.unpack(terms.all_work, text)
      local ms = at_ms - since_ms
      held = readable(held)
      all_given, all_weights = grown(readable(given), held, ms, terms.share_given_s), weights > 0 and weights or 0
      all_held, all_leads = held * left_after(ms, terms.share_held_s), readable(leads) * left_after(ms, terms.share_given_s)
    else
      all_given, all_weights, all_held, all_leads = 0, 0, 0, 0
    end
  end
end

-- Adds the names of the books that draws need, unless this call has read them.
local function add_names_of(names, draws)
  local at, number, name = 1, nil, nil
  while at <= #draws do
    number, name, at = struct.unpack('<BHc0', draws, at)
    at = at + number * terms.budget_bytes
    if not books[name] then
      books[name], names[#names + 1] = true, name
    end
  end
end

-- Adds the name of the book of a tenant, and that of the sums, unless this call has read them.
local function add_name(names, name)
  if not all_given then
    all_given, names[#names + 1] = 0, '*'
  end
  if not books[name] then
    books[name], names[#names + 1] = true, name
  end
end

-- A tenant's level, whether it is within its share while others are active, its share in seconds, and where it stands if it is
-- above that. scheduling/tenants/shares.py says what levels mean, and why they are computed here.
local function level_of(book, weight, instances)
  local weights = all_weights - book[WEIGHT] + weight
  local part = weight / weights
  local fair = math.max(instances, all_given / terms.share_given_s) * terms.share_sent_s * part
  if weights <= 1.001 * weight then
    return 0, false, fair
  elseif book[SENT] <= fair then
    return 0, true, fair
  end
  local stands = math.max(book[GIVEN] + book[RAISED], all_leads * weight - fair, 1e-9)
  local above = math.log(stands / (terms.share_from * math.max(all_given, 1e-9) * part)) / math.log(terms.share_step)
  return math.min(terms.share_levels - 1, 1 + math.max(0, math.ceil(above))), false, fair, stands
end

local function enter_work(book, sent, given, held)
  book[1], book[SENT], book[GIVEN], all_given = true, book[SENT] + sent, book[GIVEN] + given, all_given + given
  held = math.max(-book[HELD], held) -- what is not in the book cannot be freed
  book[HELD], all_held = book[HELD] + held, math.max(0, all_held + held)
  has_changes, has_sums = true, true
end

-- Enters what a placement of a tenant sent, and gave at once, the part of an instance's memory that it then holds, and where the
-- tenant stood if that was above its share.
local function send_work(book, name, weight, sent, given, held, stood, at_ms)
  all_weights, book[WEIGHT] = all_weights - book[WEIGHT] + weight, weight
  if stood then
    book[RAISED], all_leads = math.max(0, stood - book[GIVEN]), stood / weight
  end
  local past_ms = at_ms - book[SEEN]
  if not (past_ms < SEEN_EVERY_MS and past_ms > -SEEN_EVERY_MS) then
    tenants_seen = tenants_seen or {}
    book[SEEN], tenants_seen[#tenants_seen + 1], tenants_seen[#tenants_seen + 2] = at_ms, at_ms, name
  end
  enter_work(book, sent, given, held)
end

-- Enters, at the end of the call, work that an instance was given of an active tenant, and the part of its memory that the tenant's
-- contexts hold from now on.
local function give_work(name, work_s, held)
  if not name or name == '' then
    return
  elseif not work_given then
    work_given = { name, work_s, held }
  else
    local last = #work_given
    work_given[last + 1], work_given[last + 2], work_given[last + 3] = name, work_s, held
  end
end

-- Enters that a context no longer holds the part of the memory that it held for so long.
local function free_memory(name, part, ms)
  give_work(name, 0, -part * left_after(ms, terms.share_held_s))
end

-- Forgets the work of tenants that were not active for long, at most so many at a time.
local function forget_inactive(most, at_ms)
  local names, before = {}, string.format('(%d', at_ms - terms.share_active_ms)
  local found = redis.call('ZRANGEBYSCORE', keys.shares_active, '-inf', before, 'LIMIT', 0, most)
  for _, name in ipairs(found) do
    add_name(names, name)
  end
  read_books(names, at_ms)
  for _, name in ipairs(found) do
    local book = books[name]
    all_weights, all_held = math.max(0, all_weights - book[WEIGHT]), math.max(0, all_held - book[HELD])
    book[1], book[SENT], book[GIVEN], book[WEIGHT], book[HELD], book[RAISED] = true, 0, 0, 0, 0, 0
    redis.call('ZREM', keys.shares_active, name)
  end
end

-- The place of a budget in a book; nil where it is not there.
local function place_of(book, kind)
  for place = BUDGETS, #book, 3 do
    if book[place] == kind then
      return place
    end
  end
end

-- The place of a budget in a book, which is entered where it is not there.
local function place_for(book, kind)
  local place = place_of(book, kind)
  if not place then
    place = #book + 1
    book[place], book[place + 1], book[place + 2] = kind, 0, 0
  end
  return place
end

-- Brings a budget of a book to a time; the amount that is used of it then.
local function settle(book, place, leak, at_ms)
  local period, used, since = book[place] % 4, book[place + 1], book[place + 2]
  if period == MINUTE then
    used = at_ms > since and used - (at_ms - since) / 1000 * leak or used
    since = at_ms
  elseif period ~= IN_FLIGHT then
    local now = period_at(period, at_ms)
    used, since = since == now and used or 0, now
  end
  used = used > 0 and used or 0
  book[place + 1], book[place + 2] = used, since
  return used
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

-- Tells the leader that a request did not fit into the part of this pool, or that there is little left of it.
local function want(name, needs, capacity, pools)
  redis.call(needs > 0 and 'HSET' or 'HSETNX', keys.budgets_wanted, name, string.format('%d %d %s', needs, capacity, pools))
end

-- The part of a budget that this pool has, and what leaks of it a second, and what is unused in other pools. 'division' has its name,
-- the part that the pool begins with, and the pools. Also whether it was allotted of this amount.
local function divided(division, amount)
  local name = division[1]
  if part_texts[name] == nil then
    part_texts[name] = redis.call('HGET', keys.budgets_allotted, name)
  end
  local part, is_right, _, rest = part_of(part_texts[name], amount, division[2])
  return part, part / 60, rest, is_right
end

-- Compares draws with their budgets, which were read: whether they fit, or must; and packed doubles: the amount that is used of each,
-- and behind these, for each that is divided, the part of this pool and what is unused in other pools. With 'again' they are drawn
-- already: they do not count as used.
local function weigh_draws(draws, divisions, must, at_ms, again)
  local at, last, fits, parts = 1, 0, true, nil
  while at <= #draws do
    local number, name, place = nil, nil, BUDGETS
    number, name, at = struct.unpack('<BHc0', draws, at)
    local book = books[name]
    for _ = 1, number do
      local kind, cost, amount, division, capacity, leak, rest, is_right
      kind, cost, amount, at = struct.unpack('<Bdd', draws, at)
      if kind >= terms.divided then
        parts = parts or {}
        kind, division = kind - terms.divided, divisions[#parts / 2 + 1]
        capacity, leak, rest, is_right = divided(division, amount)
        parts[#parts + 1], parts[#parts + 2] = capacity, rest
      else
        capacity, leak = amount, amount / 60
      end
      if book[place] ~= kind then
        place = place_for(book, kind)
      end
      local used = settle(book, place, leak, at_ms)
      last = last + 1
      used = again and math.max(0, used - cost) or used
      FOUND[last], WEIGHED[3 * last - 2], WEIGHED[3 * last - 1], WEIGHED[3 * last] = used, book, place + 1, cost
      local is_within = used + cost <= capacity or must
      fits = fits and is_within
      if division and (not is_right or used + cost > terms.wanted_from * capacity) then
        want(division[1], is_within and 0 or cost, amount, division[3])
      end
      place = place + 3
    end
  end
  WEIGHED[3 * last + 1] = nil
  for place = 1, parts and #parts or 0 do
    last = last + 1
    FOUND[last] = parts[place]
  end
  return fits, struct.pack(format_of(DOUBLES_FORMATS, '<', 'd', last), unpack(FOUND, 1, last))
end

-- Draws what was weighed last.
local function draw()
  local first, book = 1, WEIGHED[1]
  while book do
    local place = WEIGHED[first + 1]
    book[1], book[place], first = true, book[place] + WEIGHED[first + 2], first + 3
    book = WEIGHED[first]
  end
  has_changes = true
end

-- Draws as the record of a request has them, as text, in packed form: each with its book.
local function draws_of_record(text)
  local packed = {}
  for name, kind, amount in string.gmatch(text, '(%S+)/([%w_]+/[%w_]+) (%d+)') do
    for place, each in ipairs(KINDS) do
      if each == kind then
        packed[#packed + 1] = struct.pack('<BH', 1, #name) .. name .. struct.pack('<Bdd', place - 1, tonumber(amount), 0)
      end
    end
  end
  return table.concat(packed)
end

-- Takes, at the end of the call, from budgets what a request drew at a time and gives back: draws, or '' for all that its record has.
-- An amount below 0 is drawn beside it, and what has leaked away before is no credit for it.
local function give_back(returned, record, drawn_ms)
  returned = returned ~= '' and returned or draws_of_record(record)
  if not given_back then
    given_back = { returned, drawn_ms }
  else
    local last = #given_back
    given_back[last + 1], given_back[last + 2] = returned, drawn_ms
  end
end

-- Takes an amount from a budget of a book at a place.
local function take(book, place, amount, leak, drawn_ms, at_ms)
  local period, used, since = book[place] % 4, book[place + 1], book[place + 2]
  if period ~= MINUTE and period ~= IN_FLIGHT and since ~= period_at(period, drawn_ms) then
    return
  end
  used = used > 0 and used or 0
  if amount < 0 and period == MINUTE then
    used = math.max(used, (at_ms - since) / 1000 * leak)
  end
  book[1], book[place + 1], has_changes = true, used > amount and used - amount or 0, true
end

-- Takes what one request gives back. What is not used is left alone.
local function take_draws(draws, drawn_ms, at_ms)
  local at = 1
  while at <= #draws do
    local number, name, place = nil, nil, BUDGETS
    number, name, at = struct.unpack('<BHc0', draws, at)
    local book = books[name]
    for _ = 1, number do
      local kind, amount, of, leak
      kind, amount, of, at = struct.unpack('<Bdd', draws, at)
      if kind >= terms.divided then
        kind = kind - terms.divided
        leak = amount < 0 and part_of(redis.call('HGET', keys.budgets_allotted, name .. '/' .. KINDS[kind + 1]), of, of) / 60
      end
      if book[place] ~= kind then
        place = place_of(book, kind)
      end
      if place and amount ~= 0 then
        take(book, place, amount, leak or of / 60, drawn_ms, at_ms)
      end
      place = (place or BUDGETS) + 3
    end
  end
end

-- Enters what requests gave back, and the work that instances were given.
local function enter_ends(at_ms)
  local names = {}
  for first = 1, given_back and #given_back or 0, 2 do
    add_names_of(names, given_back[first])
  end
  for first = 1, work_given and #work_given or 0, 3 do
    add_name(names, work_given[first])
  end
  read_books(names, at_ms)
  for first = 1, given_back and #given_back or 0, 2 do
    take_draws(given_back[first], given_back[first + 1], at_ms)
  end
  for first = 1, work_given and #work_given or 0, 3 do
    local book = books[work_given[first]]
    if book[WEIGHT] > 0 then
      enter_work(book, 0, work_given[first + 1], work_given[first + 2])
    end
  end
end

-- Draws again what the store lost, as the records of requests have it. Of a budget that leaks nothing has leaked since it was written:
-- the next draw knows how much does.
local function draw_again(records, at_ms)
  local all, names = {}, {}
  for place, record in ipairs(records) do
    all[place] = draws_of_record(record)
    add_names_of(names, all[place])
  end
  read_books(names, at_ms)
  for _, draws in ipairs(all) do
    local at, _, name, kind, amount = 1, nil, nil, nil, nil
    while at <= #draws do
      _, name, at = struct.unpack('<BHc0', draws, at)
      kind, amount, _, at = struct.unpack('<Bdd', draws, at)
      local book = books[name]
      local is_written = place_of(book, kind)
      local place = place_for(book, kind)
      if not is_written or kind % 4 ~= MINUTE then
        settle(book, place, 0, at_ms)
      end
      book[1], book[place + 1], has_changes = true, book[place + 1] + amount, true
    end
  end
end

-- Whether a book has to be kept.
local function is_used(book)
  if book[WEIGHT] > 0 then
    return true
  end
  for place = BUDGETS + 1, #book, 3 do
    if book[place] > 0 then
      return true
    end
  end
  return false
end

-- Writes the books that this call changed, at its end.
local function write_books(at_ms)
  if given_back or work_given then
    enter_ends(at_ms)
  end
  if tenants_seen then
    redis.call('ZADD', keys.shares_active, unpack(tenants_seen))
    forget_inactive(#tenants_seen, at_ms)
  end
  if not has_changes then
    return
  end
  local written, last, unused = {}, 0, nil
  if has_sums then
    written, last = { '*', struct.pack(terms.all_work, all_given, at_ms, all_weights, all_held, all_leads) }, 2
  end
  for name, book in pairs(books) do
    if book[1] and is_used(book) then
      local number = (#book + 1 - BUDGETS) / 3
      written[last + 1] = name
      written[last + 2] = struct.pack(format_of(BOOK_FORMATS, terms.work, 'Bdd', number), unpack(book, SENT))
      last = last + 2
    elseif book[1] then
      unused = unused or {}
      unused[#unused + 1] = name
    end
  end
  if last > 0 then
    redis.call('HSET', keys.books, unpack(written))
  end
  if unused then
    redis.call('HDEL', keys.books, unpack(unused))
  end
end
