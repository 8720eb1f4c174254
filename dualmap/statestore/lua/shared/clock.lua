-- Stands in front of every script: the time, and the refusal of a call that arrives too late to act.
-- The only clock is the server's own. ARGV[1] of every script is the time of that clock, in ms, after which the caller has
-- given the call up: bytes may be held on their way for longer than a caller waits. In memory and in tests it is '@' and the
-- time to take instead of the clock.
local own_ms = string.match(ARGV[1], '^@(%d+)$')
local now_ms = tonumber(own_ms)
if not own_ms then
  local time = redis.call('TIME')
  now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  if now_ms > tonumber(ARGV[1]) then
    return redis.error_reply('LATE ' .. string.format('%d', now_ms) .. ' the caller gave this call up at ' .. ARGV[1])
  end
end
