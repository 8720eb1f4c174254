-- Replaces what is described of an instance, or adds one, if it is described still as its caller read it; its counts stay.
-- One whose key is gone, by eviction or by hand, is added with an empty cache.
-- ARGV  1 clock, 2 instance id, 3 fence or '', 4 description and more about it as they were read, '' for none,
--       5 description (statestore/records.py), '' to check the fence alone, 6 more about it, as JSON, 7 '1' to forget its cache
-- Reply 1, or 0 if it is described otherwise by now; error FENCED
local id, now_ms = ARGV[2], store_now_ms()
local refused, text, about = fence_error(ARGV[3], now_ms), unpack(redis.call('HMGET', keys.instance .. id, 'record', 'about'))
local counts_at = text and string.find(text, INSTANCE.counts_begin, 1, true)
local former = text and string.sub(text, 1, counts_at - 1) .. about or ''
if refused then
  return refused
elseif ARGV[5] == '' or former ~= ARGV[4] then
  return 0
end
local changed = redis.call('SADD', keys.instances, id) == 1 or former ~= ARGV[5] .. ARGV[6]
local forgets, before = not text or ARGV[7] == '1', text and instance_from(id, text)
if not changed and not forgets then
  return 1
end
local instance = instance_from(id, ARGV[5] .. (text and string.sub(text, counts_at) or INSTANCE.no_counts))
if forgets then
  redis.call('DEL', keys.kv .. id)
  forget_events(id)
  instance.cached_blocks = 0
end
if before and before.state ~= instance.state and instance.pending_tokens > 0 then
  instance.work_since_ms = now_ms
end
if before and before.role ~= instance.role then
  redis.call('ZREM', keys.least_loaded .. before.role, id)
end
redis.call('HINCRBY', keys.meta, 'epoch', changed and 1 or 0)
redis.call('HSET', keys.instance .. id, 'about', ARGV[6])
write_instance(instance)
return 1
