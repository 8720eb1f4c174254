-- include: clock
-- include: kv
-- include: load
-- The versions, and from the key FIRST on the load and hit of each instance, as JSON. Counts the observation.
local function observation(meta_key, first_key, chain)
  local now_ms = store_now_ms()
  local sequence = redis.call('HINCRBY', meta_key, 'observations', 1)
  local versions = redis.call('HMGET', meta_key, 'epoch', 'tree_version')
  local reply = { versions[1] or '0', versions[2] or '0', sequence, string.format('%d', now_ms) }
  for first = first_key, #KEYS, 4 do
    reply[#reply + 1] = read_load(first, hit_blocks(KEYS[first + 3], chain))
  end
  return json_list(reply)
end
