-- How every script runs: the time, the refusal of a call that arrives too late to act, and what modules do before each
-- call. The only clock is the server's own. ARGV[1] of every script is the time of that clock, in ms, after which the
-- caller has given the call up: bytes may be held on their way for longer than a caller waits. In memory and in tests
-- it is '@' and the time to take instead of the clock.
local tonumber = tonumber
local call, floor, format, match = redis.call, math.floor, string.format, string.match

-- The reply of a script, which is given the time. 'begins' are the functions by which its modules begin a call.
local function run_script(script, begins)
  local until_ms = ARGV[1]
  local now_ms = tonumber(match(until_ms, '^@(%d+)$'))
  if not now_ms then
    local time = call('TIME')
    now_ms = time[1] * 1000 + floor(time[2] / 1000)
    if now_ms > tonumber(until_ms) then
      return redis.error_reply('LATE ' .. format('%d', now_ms) .. ' the caller gave this call up at ' .. until_ms)
    end
  end
  for place = 1, #begins do
    begins[place]()
  end
  return script(now_ms)
end

return run_script
