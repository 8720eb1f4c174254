-- Writes what the leader publishes into hashes, each in one piece.
-- KEYS  1 meta, 2 leader, then one hash for each of the parts
-- ARGV  1 clock, 2 fence, 3 '1' if the tree version grows, else '0', 4 parts as JSON, one for each hash:
--       [replace it, fields by name]; fields of a hash that is not replaced are written only where it exists
-- Reply the tree version; error FENCED
-- include: clock, leases
local refused = fence_error(KEYS[2], ARGV[2], store_now_ms())
if refused then
  return refused
end
for place, part in ipairs(cjson.decode(ARGV[4])) do
  local key, replaced = KEYS[place + 2], part[1]
  if replaced then
    redis.call('DEL', key)
  end
  if replaced or redis.call('EXISTS', key) == 1 then
    for name, text in pairs(part[2]) do
      redis.call('HSET', key, name, text)
    end
  end
end
return redis.call('HINCRBY', KEYS[1], 'tree_version', ARGV[3])
