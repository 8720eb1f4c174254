-- One instance's load and its held requests in the order of granting: those that stepped behind come last.
-- KEYS  1 requests, 2-6 account, queue, running, kv, late of the instance
-- ARGV  1 test clock ms or ''
-- Reply {now ms, JSON: [account fields + queued, running, cached, 0] | null, {request as JSON, …}}
-- Clock the server's
-- include: clock
-- include: load
local held = {}
for _, list_key in ipairs({ KEYS[3], KEYS[6] }) do
  for _, request_id in ipairs(redis.call('ZRANGE', list_key, 0, -1)) do
    local text = redis.call('HGET', KEYS[1], request_id)
    if text then
      held[#held + 1] = text
    end
  end
end
return { store_now_ms(), read_load(2, 0), held }
