-- include: clock
-- include: kv
-- include: load
-- The versions, and from the key FIRST on the load and hit of each instance. Counts the observation.
local function observation(meta_key, first_key, chain)
  local now_ms = store_now_ms()
  local sequence = redis.call('HINCRBY', meta_key, 'observations', 1)
  local versions = redis.call('HMGET', meta_key, 'epoch', 'tree_version')
  local reply = { versions[1] or '0', versions[2] or '0', sequence, now_ms }
  for first = first_key, #KEYS, 4 do
    local load = read_load(first)
    if load then
      load[#load + 1] = hit_blocks(KEYS[first + 3], chain)
    end
    reply[#reply + 1] = load or 0
  end
  return reply
end
