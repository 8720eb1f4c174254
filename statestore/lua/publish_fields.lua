-- Replaces what the leader publishes, and the learned prefill rates of instances that exist.
-- ARGV  1 clock, 2 fence, 3 '1' if the tree version grows, else '0', 4 'tree', 'learned' or 'scaling', 5 its fields, as
--       JSON, 6 prefill rates by instance id, as JSON; with scaling 7 a line for its log
-- Reply the tree version; error FENCED
local refused = fence_error(ARGV[2], store_now_ms())
local key = ({ tree = keys.hotness_tree, learned = keys.learned, scaling = keys.scaling })[ARGV[4]]
if refused then
  return refused
end
redis.call('DEL', key)
for name, text in pairs(cjson.decode(ARGV[5])) do
  redis.call('HSET', key, name, text)
end
for id, tokens_per_s in pairs(cjson.decode(ARGV[6])) do
  local instance = read_instance(id)
  if instance then
    instance.tokens_per_s = tokens_per_s
    write_record(instance)
  end
end
if ARGV[7] then
  redis.call('LPUSH', keys.scaling_log, ARGV[7])
  redis.call('LTRIM', keys.scaling_log, 0, terms.scaling_log - 1)
end
return redis.call('HINCRBY', keys.meta, 'tree_version', ARGV[3])
