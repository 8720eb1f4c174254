-- Enters turns in the ledger of runs, and replies which may go now. A turn that was entered before stays as it is, so
-- a replica repeats the turns that wait: what became of them is found so where a message got lost, and what the store
-- lost is entered again.
-- ARGV  1 clock, 2 the KV memory of the ready instances, in tokens; then 3 for each turn: about it, as JSON {id,
--       replica_id, run, branch, parent, tenant, tokens: of its prompt, waits_ms, stride: blocks between two samples,
--       block_tokens}; its chain, packed; of its tenant's share the weight, instances and name, packed, or ''
-- Reply for each 1 where it goes, 0 where it waits, 2 where too many of its run wait already, and it is not entered
local books = require('shared.books')
local runs = require('shared.runs')
local shares = require('shared.shares')
local decode, sub, unpack_from = cjson.decode, string.sub, struct.unpack

local FIRST_TURN = 3

-- Reads the books of the tenants that have shares.
local function read_books(now_ms)
  local names = {}
  for first = FIRST_TURN, #ARGV, 3 do
    if ARGV[first + 2] ~= '' then
      books.add_tenant(names, sub(ARGV[first + 2], 17))
    end
  end
  books.read_books(names, now_ms)
end

-- The level of a tenant by the work that it has sent, now.
local function level_of(share)
  if share == '' then
    return 0
  end
  local weight, instances = unpack_from('<dd', share)
  return (shares.level_of(books.kept.books[sub(share, 17)], weight, instances))
end

local function admit_turns(now_ms)
  local replies, replied = {}, {}
  read_books(now_ms)
  runs.figures().capacity_tokens = ARGV[2] + 0
  for first = FIRST_TURN, #ARGV, 3 do
    local turn = decode(ARGV[first])
    turn.level = level_of(ARGV[first + 2])
    replies[#replies + 1] = runs.arrive(turn, ARGV[first + 1], now_ms)
    replied[#replied + 1] = turn.replica_id .. ' ' .. turn.id
  end
  runs.let_go(now_ms)
  for place, key in ipairs(replied) do
    replied[key] = true
    replies[place] = runs.goes(key) or replies[place]
  end
  runs.tell(replied)
  runs.write_runs()
  return replies
end

return admit_turns
