-- Enters turns in the ledger of runs, and replies which may go now. A turn that was entered before stays as it is, so
-- a replica repeats the turns that wait: what became of them is found so where a message got lost, and what the store
-- lost is entered again.
-- ARGV  1 clock, 2 the KV memory of the ready instances, in tokens; then 2 for each turn: about it, as JSON {id,
--       replica_id, run, branch, parent, tenant, tokens: of its prompt, waits_ms, stride: blocks between two samples,
--       block_tokens}; its chain, packed
-- Reply for each 1 where it goes, 0 where it waits, 2 where too many of its run wait already, and it is not entered
local runs = require('shared.runs')
local decode = cjson.decode

local FIRST_TURN = 3

local function admit_turns(now_ms)
  local replies, replied = {}, {}
  runs.figures().capacity_tokens = ARGV[2] + 0
  for first = FIRST_TURN, #ARGV, 2 do
    local turn = decode(ARGV[first])
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
