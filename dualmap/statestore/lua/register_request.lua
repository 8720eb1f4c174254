-- Admits a request that is passed on without being placed: draws from its tenant's budgets, and keeps a record on no
-- instance, by which it is released, metered and, should its replica die, reaped like any other.
-- ARGV  1 clock, 2 request id, 3 its draws, packed (BudgetGroup.packed), or '', 4 their divisions as a JSON array
--       (weigh_draws), 5 what its replica tells of it, as JSON
-- Reply {'dispatched', 'limited' or 'duplicate', budgets (weigh_draws)}
local books = require('shared.books')
local budgets = require('shared.budgets')
local leases = require('shared.leases')
local requests = require('shared.requests')
local usage = require('shared.usage')
local write_books = require('shared.book_end')
local decode = cjson.decode

local function register_request(now_ms)
  local id, draws, told = ARGV[2], ARGV[3], decode(ARGV[5])
  local former, is_damaged = requests.read(id, 'told')
  if former or is_damaged then -- a repetition after a lost answer has been admitted
    local is_same = former and former.told.replica_id == told.replica_id and former.instance_id == ''
    return { is_same and 'dispatched' or 'duplicate', '' }
  end
  local fits, drawn = true, ''
  if draws ~= '' then
    local names = {}
    budgets.add_names_of(names, draws)
    books.read_books(names, now_ms)
    fits, drawn = budgets.weigh_draws(draws, decode(ARGV[4]), false, now_ms)
  end
  if not fits then
    if told.account ~= '' then
      usage.add_usage(told.account, usage.REFUSED)
      usage.write_usage(now_ms)
    end
    return { 'limited', drawn }
  end
  if draws ~= '' then
    budgets.draw()
    write_books(now_ms)
  end
  requests.enter_nowhere(id, 'dispatched', ARGV[5], now_ms)
  leases.lease_first(told.replica_id, now_ms)
  return { 'dispatched', drawn }
end

return register_request
