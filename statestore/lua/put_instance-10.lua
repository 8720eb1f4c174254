-- Adds an instance, or updates the description of a known one; its state and figures stay. One whose key is gone, by
-- eviction or by hand, is added anew: its stamps begin again, so its cache does, too.
-- KEYS  1 meta, 2 instances, 3 requests, 4-8 account, queue, running, kv, late of the instance, 9 chains of held
--       requests, 10 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 instance id, 4 state of a new one, 5.. name, value, name, value, …
-- Reply 1 if anything changed
-- Clock the server's
-- include: clock
-- include: description
-- include: grants
-- include: prefill_rate
local now_ms = store_now_ms()
local known = redis.call('HGET', KEYS[4], 'state')
local listed = redis.call('SADD', KEYS[2], ARGV[3]) == 0
if known and listed and not differs(KEYS[4], 5) then
  return 0
end
redis.call('HSET', KEYS[4], unpack(ARGV, 5))
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
if not known then
  local prior = tonumber(redis.call('HGET', KEYS[4], 'prefill_tokens_per_s'))
  redis.call('DEL', KEYS[7])
  redis.call('HSET', KEYS[4], 'state', ARGV[4],
    'pending_tokens', 0, 'dispatched_tokens', 0, 'context_tokens', 0, 'window_tokens', 0, 'window_ms', 0,
    'rate_tokens', prior * PRIOR_S, 'rate_busy_s', PRIOR_S, 'last_prefill_ms', 0, 'work_since_ms', 0, 'kv_stamp', 0,
    'late_tokens', 0, 'late_requests', 0, 'aside_tokens', 0, 'overdue_work_ms', 0, 'overdue_at_ms', 0)
end
local account = read_account(4, ARGV[3])
grant_next(KEYS[3], account, now_ms)
write_account(account)
return 1
