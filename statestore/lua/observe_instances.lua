-- Loads of some instances and their hits of one chain.
-- ARGV  1 clock, 2 chain, packed, 3.. instance ids
-- Reply JSON: [epoch, tree version, number of this observation, now ms, an instance (instance_json) or null for each, …]
local versions, seen = redis.call('HMGET', keys.meta, 'epoch', 'tree_version'), {}
for place = 3, #ARGV do
  local instance = read_instance(ARGV[place])
  seen[#seen + 1] = ',' .. (instance and instance_json(instance, (hit_blocks(instance.id, ARGV[2]))) or 'null')
end
local numbered = redis.call('HINCRBY', keys.meta, 'observations', 1)
return string.format('[%s,%s,%d,%d%s]', versions[1] or 0, versions[2] or 0, numbered, store_now_ms(), table.concat(seen))
