-- Replaces the hotness tree and its counters; the version grows only when the set of hot prefixes changed.
-- KEYS  1 meta, 2 leader, 3 hotness tree
-- ARGV  1 test clock ms or '', 2 fence, 3.. prefix in hex, 'depth count', prefix, …
-- Reply the tree version; error FENCED
-- Clock the server's
-- include: clock
-- include: fence
local refused = fence_error(KEYS[2], ARGV[2], store_now_ms())
if refused then
  return refused
end
local changed = redis.call('HLEN', KEYS[3]) ~= (#ARGV - 2) / 2
for index = 3, #ARGV, 2 do
  local known = redis.call('HGET', KEYS[3], ARGV[index])
  if not known or string.match(known, '^%d+') ~= string.match(ARGV[index + 1], '^%d+') then
    changed = true
    break
  end
end
redis.call('DEL', KEYS[3])
for index = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[3], ARGV[index], ARGV[index + 1])
end
return redis.call('HINCRBY', KEYS[1], 'tree_version', changed and 1 or 0)
