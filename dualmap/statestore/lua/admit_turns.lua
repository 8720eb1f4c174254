-- Enters turns in the ledger of runs, and replies which may go now. A turn that was entered before stays as it is, so
-- a replica repeats the turns that wait: what became of them is found so where a message got lost, and what the store
-- lost is entered again.
-- ARGV  1 clock, 2 the KV memory of the ready instances, in tokens; then 2 for each turn: about it, as JSON
--       (statestore/pool/runs.py); its chain, packed
-- Reply for each 1 where it goes, 0 where it waits, 2 where too many of its run wait already, and it is not entered
local books = require('shared.books')
local runs = require('shared.runs')
local decode = cjson.decode

local FIRST_TURN = 3

local function admit_turns(now_ms)
  local replies, turns, names = {}, {}, {}
  for first = FIRST_TURN, #ARGV, 2 do
    local turn = decode(ARGV[first])
    turns[#turns + 1] = turn
    if turn.share then
      books.add_tenant(names, turn.share[1])
    end
  end
  books.read_books(names, now_ms)
  for place, turn in ipairs(turns) do
    replies[place] = runs.enter(turn, ARGV[FIRST_TURN + 2 * place - 1], ARGV[2] + 0, now_ms)
  end
  runs.let_go(now_ms)
  for place, turn in ipairs(turns) do
    replies[place] = runs.goes(turn) or replies[place]
  end
  runs.write_runs()
  return replies
end

return admit_turns
