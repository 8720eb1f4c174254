-- Changes fields of a known instance's description; the others, its state and figures stay.
-- KEYS  1 meta, 2 leader, 3 requests, 4-8 account, queue, running, kv, late of the instance, 9 chains of held
--       requests, 10 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 instance id, 4 fence or '', 5.. name, value, name, value, …
-- Reply 1, or 0 if the instance is unknown; error FENCED
-- Clock the server's
-- include: clock
-- include: description
-- include: fence
-- include: grants
local now_ms = store_now_ms()
if ARGV[4] ~= '' then
  local refused = fence_error(KEYS[2], ARGV[4], now_ms)
  if refused then
    return refused
  end
end
if redis.call('EXISTS', KEYS[4]) == 0 then
  return 0
end
if not differs(KEYS[4], 5) then
  return 1
end
redis.call('HSET', KEYS[4], unpack(ARGV, 5))
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
local account = read_account(4, ARGV[3])
grant_next(KEYS[3], account, now_ms)
write_account(account)
return 1
