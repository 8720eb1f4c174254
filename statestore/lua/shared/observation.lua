-- include: clock
-- include: kv
-- include: load
-- What an observation begins with: the versions, and its number, which this counts.
local function begin_observation(meta_key, now_ms)
  local sequence = redis.call('HINCRBY', meta_key, 'observations', 1)
  local versions = redis.call('HMGET', meta_key, 'epoch', 'tree_version')
  return { versions[1] or '0', versions[2] or '0', sequence, string.format('%d', now_ms) }
end

-- The versions, and from the key FIRST on the load and hit of each instance, as JSON.
local function observation(meta_key, first_key, chain)
  local reply = begin_observation(meta_key, store_now_ms())
  for first = first_key, #KEYS, 4 do
    reply[#reply + 1] = read_load(first, hit_blocks(KEYS[first + 3], chain))
  end
  return json_list(reply)
end
