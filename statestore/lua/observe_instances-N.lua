-- Figures of some instances and their hits of one chain.
-- KEYS  1 meta, then 4 for each instance
-- ARGV  1 clock, 2 chain, packed
-- Reply JSON: [epoch, tree version, number of this observation, now ms, figures and hit of each instance or null, …]
-- include: clock, instance, kv
local versions, seen = redis.call('HMGET', KEYS[1], 'epoch', 'tree_version'), {}
for first = 2, #KEYS, 4 do
  local instance = read_instance(first)
  seen[#seen + 1] = ',' .. (instance and instance_json(instance, hit_blocks(instance.kv_key, ARGV[2])) or 'null')
end
local numbered = redis.call('HINCRBY', KEYS[1], 'observations', 1)
return string.format('[%s,%s,%d,%d%s]', versions[1] or 0, versions[2] or 0, numbered, store_now_ms(), table.concat(seen))
