-- Changes an instance's state. Going down or starting anew forgets what its cache held.
-- KEYS  1 meta, 2 leader, 3 requests, 4-8 account, queue, running, kv, late of the instance, 9 chains of held
--       requests, 10 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 instance id, 4 state, 5 expected state or '', 6 fence or ''
-- Reply 1, or 0 if the instance is unknown or not in the expected state; error FENCED
-- Clock the server's
-- include: clock
-- include: fence
-- include: grants
local now_ms = store_now_ms()
if ARGV[6] ~= '' then
  local refused = fence_error(KEYS[2], ARGV[6], now_ms)
  if refused then
    return refused
  end
end
local account = read_account(4, ARGV[3])
if not account or (ARGV[5] ~= '' and account.state ~= ARGV[5]) then
  return 0
end
if account.state == ARGV[4] then
  return 1
end
account.state = ARGV[4]
redis.call('HSET', account.key, 'state', account.state)
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
if account.state == 'down' or account.state == 'starting' then
  redis.call('DEL', account.kv_key)
end
if account.pending_tokens > 0 then
  account.work_since_ms = now_ms
end
grant_next(KEYS[3], account, now_ms)
write_account(account)
return 1
