-- Loads of some instances, without hits.
-- KEYS  4 per instance: account, queue, running, kv
-- ARGV  1 test clock ms or ''
-- Reply {now ms, one per instance as JSON: [account fields + queued, running, cached, 0] | null}
-- Clock the server's, passed on so that the reader decays and measures with it
-- include: clock
-- include: load
local reply = { store_now_ms() }
for first = 1, #KEYS, 4 do
  reply[#reply + 1] = read_load(first, 0)
end
return reply
