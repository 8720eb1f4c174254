-- Loads of some instances and their hits of one chain.
-- KEYS  1 meta; then 4 per instance: account, queue, running, kv
-- ARGV  1 test clock ms or ''; 2 chain, packed
-- Reply {epoch, tree version, sequence, now ms, one per instance: account fields + queued, running, cached, hit | 0}
-- Clock the server's, passed on so that the reader decays and measures with it
-- include: clock
-- include: kv
-- include: load
local now_ms = store_now_ms()
local sequence = redis.call('HINCRBY', KEYS[1], 'observations', 1)
local versions = redis.call('HMGET', KEYS[1], 'epoch', 'tree_version')
local reply = { versions[1] or '0', versions[2] or '0', sequence, now_ms }
for first = 2, #KEYS, 4 do
  local load = read_load(first)
  if load then
    load[#load + 1] = hit_blocks(KEYS[first + 3], ARGV[2])
  end
  reply[#reply + 1] = load or 0
end
return reply
