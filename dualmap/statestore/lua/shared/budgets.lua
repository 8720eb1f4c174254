-- What is used of tenants' limits (scheduling/tenants/budgets.py), in their books: of each budget the number of its
-- kind, the amount that was used, and since when: the time in ms of one that leaks, of which some has leaked since; the
-- day or month of a quota; 0 of what is in flight.
--
-- Draws are packed (BudgetGroup.packed): for each book their number and its name, then for each the kind, an amount,
-- and that of the limit. Where a budget is divided, terms.divided is added to its kind.
local allotments = require('shared.allotments')
local books = require('shared.books')
local calendar = require('shared.calendar')
local part_of, want, divided = allotments.part_of, allotments.want, allotments.divided
local BUDGETS, KINDS, kept = books.BUDGETS, books.KINDS, books.kept
local add_name, read_books, packed_doubles = books.add_name, books.read_books, books.packed_doubles
local utc_month = calendar.utc_month
local ipairs, tonumber = ipairs, tonumber
local call, floor, max, gmatch = redis.call, math.floor, math.max, string.gmatch
local pack, unpack_from = struct.pack, struct.unpack

-- The period of a kind is the rest of the division of its number by 4.
local MINUTE, DAY, IN_FLIGHT = 0, 1, 3

-- The draws that were weighed last, as book, place of what is used there, amount, book, …, nil.
local weighed = {}

-- The amounts that were left then, and of each budget that is divided, behind them, the part and the rest.
local found = {}

-- Until its end (shared/book_end.lua) a call keeps what requests give back, as draws, their time, ….
local given_back

-- Adds the names of the books that draws need, unless this call has read them.
local function add_names_of(names, draws)
  local at, number, name = 1
  while at <= #draws do
    number, name, at = unpack_from('<BHc0', draws, at)
    at = at + number * terms.budget_bytes
    add_name(names, name)
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

-- The number of the period of a quota at a time.
local function period_at(kind, at_ms)
  return kind % 4 == DAY and floor(at_ms / 86400000) or utc_month(at_ms)
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

-- Compares draws with their budgets, which were read: whether they fit, or must; and packed doubles: the amount that
-- they leave of each, below 0 where it is less, and behind these, for each that is divided, the part of this pool and
-- what is unused in other pools. With 'again' they are drawn already: they do not count as used.
local function weigh_draws(draws, divisions, must, at_ms, again)
  local at, last, fits, parts = 1, 0, true, nil
  while at <= #draws do
    local number, name
    local place = BUDGETS
    number, name, at = unpack_from('<BHc0', draws, at)
    local book = kept.books[name]
    for _ = 1, number do
      local kind, cost, amount, division, capacity, leak, rest, is_right
      kind, cost, amount, at = unpack_from('<Bdd', draws, at)
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
      used = again and max(0, used - cost) or used
      local left = capacity - used - cost
      found[last], weighed[3 * last - 2], weighed[3 * last - 1], weighed[3 * last] = left, book, place + 1, cost
      local is_within = used + cost <= capacity or must
      fits = fits and is_within
      if division and (not is_right or used + cost > terms.wanted_from * capacity) then
        want(division[1], is_within and 0 or cost, amount, division[3])
      end
      place = place + 3
    end
  end
  weighed[3 * last + 1] = nil
  for place = 1, parts and #parts or 0 do
    last = last + 1
    found[last] = parts[place]
  end
  return fits, packed_doubles(found, last)
end

-- Draws what was weighed last.
local function draw()
  local first, book = 1, weighed[1]
  while book do
    local place = weighed[first + 1]
    book[1], book[place], first = true, book[place] + weighed[first + 2], first + 3
    book = weighed[first]
  end
  kept.has_changes = true
end

-- Draws as the record of a request has them, as text, in packed form: each with its book.
local function draws_of_record(text)
  local packed = {}
  for name, kind, amount in gmatch(text, '(%S+)/([%w_]+/[%w_]+) (%d+)') do
    for place, each in ipairs(KINDS) do
      if each == kind then
        packed[#packed + 1] = pack('<BH', 1, #name) .. name .. pack('<Bdd', place - 1, tonumber(amount), 0)
      end
    end
  end
  return table.concat(packed)
end

-- Takes, at the end of the call, from budgets what a request drew at a time and gives back: draws, or '' for all that
-- its record has. An amount below 0 is drawn beside it, and what has leaked away before is no credit for it.
local function give_back(returned, record, drawn_ms)
  returned = returned ~= '' and returned or draws_of_record(record)
  if not given_back then
    given_back, kept.has_ends = { returned, drawn_ms }, true
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
    used = max(used, (at_ms - since) / 1000 * leak)
  end
  book[1], book[place + 1] = true, used > amount and used - amount or 0
end

-- Takes what one request gives back. What is not used is left alone.
local function take_draws(draws, drawn_ms, at_ms)
  local at = 1
  while at <= #draws do
    local number, name
    local place = BUDGETS
    number, name, at = unpack_from('<BHc0', draws, at)
    local book = kept.books[name]
    for _ = 1, number do
      local kind, amount, of, leak
      kind, amount, of, at = unpack_from('<Bdd', draws, at)
      if kind >= terms.divided then
        kind = kind - terms.divided
        local text = amount < 0 and call('HGET', keys.budgets_allotted, name .. '/' .. KINDS[kind + 1])
        leak = amount < 0 and part_of(text, of, of) / 60
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
  kept.has_changes = true
end

-- Adds the names of the books to which draws are given back at the end of the call.
local function add_names_at_end(names)
  for first = 1, given_back and #given_back or 0, 2 do
    add_names_of(names, given_back[first])
  end
end

-- Enters what requests gave back, once the books are read.
local function enter_given_back(at_ms)
  for first = 1, given_back and #given_back or 0, 2 do
    take_draws(given_back[first], given_back[first + 1], at_ms)
  end
  given_back = nil
end

-- Draws again what the store lost, as the records of requests have it. Of a budget that leaks nothing has leaked since
-- it was written: the next draw knows how much does.
local function draw_again(records, at_ms)
  local all, names = {}, {}
  for place, record in ipairs(records) do
    all[place] = draws_of_record(record)
    add_names_of(names, all[place])
  end
  read_books(names, at_ms)
  for _, draws in ipairs(all) do
    local at, _, name, kind, amount = 1
    while at <= #draws do
      _, name, at = unpack_from('<BHc0', draws, at)
      kind, amount, _, at = unpack_from('<Bdd', draws, at)
      local book = kept.books[name]
      local is_written = place_of(book, kind)
      local place = place_for(book, kind)
      if not is_written or kind % 4 ~= MINUTE then
        settle(book, place, 0, at_ms)
      end
      book[1], book[place + 1], kept.has_changes = true, book[place + 1] + amount, true
    end
  end
end

return {
  add_names_of = add_names_of,
  place_of = place_of,
  settle = settle,
  weigh_draws = weigh_draws,
  draw = draw,
  draws_of_record = draws_of_record,
  give_back = give_back,
  take_draws = take_draws,
  add_names_at_end = add_names_at_end,
  enter_given_back = enter_given_back,
  draw_again = draw_again,
}
