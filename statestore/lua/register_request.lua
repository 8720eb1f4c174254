-- Admits a request that is passed on without being placed: draws from its tenant's budgets, and keeps a record on no instance,
-- by which it is released, metered and, should its replica die, reaped like any other.
-- ARGV  1 clock, 2 request id, 3 draws as a JSON array (weigh_draws), 4 what its replica tells of it, as JSON
-- Reply {'dispatched', 'limited' or 'duplicate', budgets (weigh_draws)}
local id, draws, told = ARGV[2], cjson.decode(ARGV[3]), cjson.decode(ARGV[4])
local former, is_damaged = read_request(id, 'told')
if former or is_damaged then -- a repetition after a lost answer has been admitted
  local is_same = former and former.told.replica_id == told.replica_id and former.instance_id == ''
  return { is_same and 'dispatched' or 'duplicate', {} }
end
local budgets = { '' }
if #draws > 0 then
  read_budgets({ draws })
  budgets = weigh_draws(draws, false, now_ms)
end
if budgets[1] ~= '' then
  add_usage(told.account, terms.refused)
  write_usage(now_ms)
  return { 'limited', budgets }
end
draw(draws)
write_budgets(now_ms)
local request = { id = id, instance_id = '', leg = 'whole', state = 'dispatched', uncached_tokens = 0, enqueued_ms = now_ms,
  dispatched_ms = now_ms, prefilled_ms = 0, alternative_id = '', alternative_uncached_tokens = 0, deferred = 0, band = 0 }
redis.call('HSET', keys.request .. id, 'placed', placed_text(request), 'told', ARGV[4])
redis.call('ZADD', keys.passed_on, now_ms, id)
lease_first(told.replica_id, now_ms)
return { 'dispatched', budgets }
