-- The only clock is the server's own. ARGV[1] of every script is '' in production; tests put their time there.
local function store_now_ms()
  if ARGV[1] ~= '' then
    return tonumber(ARGV[1])
  end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
