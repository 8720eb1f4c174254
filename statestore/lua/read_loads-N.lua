-- Loads of some instances, without hits.
-- KEYS  5 per instance: account, queue, late, running, kv
-- ARGV  1 test clock ms or ''
-- Reply {now ms, one per instance: account fields + held, running, cached | 0}
-- Clock the server's, passed on so that the reader decays and measures with it
-- include: clock
-- include: load
local reply = { store_now_ms() }
for first = 1, #KEYS, 5 do
  reply[#reply + 1] = read_load(first) or 0
end
return reply
