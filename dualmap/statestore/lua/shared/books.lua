-- Books of tenants: in one hash, one for each tenant, and one for each of its keys and models that have limits. A book
-- is packed (statestore/pool/codec.py): seven doubles, then for each budget in it a byte and two doubles.
--
-- The doubles are the tenant's work (shared/shares.lua): what it sent and what instances were given of it, seconds of
-- an instance, the time in ms at which that was so, its weight, when it was last seen to place a request, to a second,
-- the part of an instance's memory that its contexts hold from then on, and what is added to the work that it was
-- given, as it came back. '*' has the sums over the active tenants: what was given, when, the weights, the memory held,
-- and where the last one above its share stands, by weight.
--
-- A budget (shared/budgets.lua) is the number of the kind of its limit, the amount that was used, and since when. One
-- that is missing, or cannot be read, is not used.
local ipairs, pairs, unpack = ipairs, pairs, unpack
local call, exp, rep, pack, unpack_from = redis.call, math.exp, string.rep, struct.pack, struct.unpack

-- Where a book that was read has what: whether it was changed is first, and of a budget what is used and since when
-- follow its kind.
local SENT, GIVEN, AT, WEIGHT, SEEN, HELD, RAISED, BUDGETS = 2, 3, 4, 5, 6, 7, 8, 9

-- Kinds of limits, in order of their numbers, from 0.
local KINDS = terms.budget_kinds

-- The books that a call has read, by name, true while they are read, and the texts of parts (shared/allotments.lua);
-- whether any book is read, any is changed, the sums are, and anything is entered at the end of the call; and the
-- sums: of work, nil until it is read, of weights and of the memory held, and where the last tenant above its share
-- stands, by weight.
local kept = { is_read = true }

-- Before each call.
local function begin()
  if kept.is_read then
    kept.books, kept.part_texts, kept.is_read, kept.has_changes, kept.has_sums = {}, {}, false, false, false
    kept.given, kept.weights, kept.held, kept.leads = nil, 0, 0, 0
  end
end

-- Formats of books with so many budgets, and of so many doubles.
local book_formats, doubles_formats = {}, {}

local function format_of(formats, first, each, number)
  local format = formats[number]
  if not format then
    format = first .. rep(each, number)
    formats[number] = format
  end
  return format
end

-- Figures as packed doubles.
local function packed_doubles(figures, number)
  return pack(format_of(doubles_formats, '<', 'd', number), unpack(figures, 1, number))
end

-- A sum of work that can be read: somebody may have damaged it.
local function readable(work_s)
  return work_s > 0 and work_s < terms.most_work_s and work_s or 0
end

-- The part of what was entered that is left after a time.
local function left_after(ms, window_s)
  return ms > 0 and exp(-ms / 1000 / window_s) or 1
end

-- The work of a book after a time in which memory was held: what is left of it, and of what the memory adds meanwhile.
local function grown(work, held, ms, window_s)
  local left = left_after(ms, window_s)
  if held == 0 then
    return work * left
  end
  local added = (left_after(ms, terms.share_held_s) - left) / (1 / window_s - 1 / terms.share_held_s)
  return work * left + held * added
end

-- The book of a text, as it is at a time.
local function book_from(text, at_ms)
  local number = text and (#text - terms.work_bytes) / terms.budget_bytes or -1
  if number < 0 or number % 1 ~= 0 or number > #KINDS then
    return { false, 0, 0, at_ms, 0, 0, 0, 0 }
  end
  local book = { false, unpack_from(format_of(book_formats, terms.work, 'Bdd', number), text) }
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

-- Reads the sums, as they are at a time.
local function read_sums(text, at_ms)
  if not text or #text ~= terms.all_work_bytes then
    kept.given, kept.weights, kept.held, kept.leads = 0, 0, 0, 0
    return
  end
  local given, since_ms, weights, held, leads = unpack_from(terms.all_work, text)
  local ms = at_ms - since_ms
  held = readable(held)
  kept.given, kept.weights = grown(readable(given), held, ms, terms.share_given_s), weights > 0 and weights or 0
  kept.held = held * left_after(ms, terms.share_held_s)
  kept.leads = readable(leads) * left_after(ms, terms.share_given_s)
end

-- Adds the name of a book, unless this call has read it.
local function add_name(names, name)
  local books = kept.books
  if not books[name] then
    books[name], names[#names + 1] = true, name
  end
end

-- Adds the name of the book of a tenant, and that of the sums, unless this call has read them.
local function add_tenant(names, name)
  if not kept.given then
    kept.given, names[#names + 1] = 0, '*'
  end
  add_name(names, name)
end

-- Reads books; with them the sums, where a name is '*'.
local function read_books(names, at_ms)
  if not names[1] then
    return
  end
  local books = kept.books
  kept.is_read = true
  for place, text in ipairs(call('HMGET', keys.books, unpack(names))) do
    local name = names[place]
    if name ~= '*' then
      books[name] = book_from(text, at_ms)
    else
      read_sums(text, at_ms)
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

-- Writes the books that this call changed.
local function write_changes(at_ms)
  if not kept.has_changes then
    return
  end
  local written, last, unused = {}, 0, nil
  if kept.has_sums then
    written = { '*', pack(terms.all_work, kept.given, at_ms, kept.weights, kept.held, kept.leads) }
    last = 2
  end
  for name, book in pairs(kept.books) do
    if book[1] and is_used(book) then
      local number = (#book + 1 - BUDGETS) / 3
      written[last + 1] = name
      written[last + 2] = pack(format_of(book_formats, terms.work, 'Bdd', number), unpack(book, SENT))
      last = last + 2
    elseif book[1] then
      unused = unused or {}
      unused[#unused + 1] = name
    end
  end
  if last > 0 then
    call('HSET', keys.books, unpack(written))
  end
  if unused then
    call('HDEL', keys.books, unpack(unused))
  end
end

return {
  SENT = SENT, GIVEN = GIVEN, WEIGHT = WEIGHT, SEEN = SEEN, HELD = HELD, RAISED = RAISED, BUDGETS = BUDGETS,
  KINDS = KINDS,
  begin = begin,
  kept = kept,
  packed_doubles = packed_doubles,
  left_after = left_after,
  add_name = add_name,
  add_tenant = add_tenant,
  read_books = read_books,
  write_changes = write_changes,
}
