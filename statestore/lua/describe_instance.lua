-- Adds an instance, or changes the description or the state of a known one; its load stays. One whose key is gone, by
-- eviction or by hand, is added with an empty cache.
-- ARGV  1 clock, 2 instance id, 3 state of a new one or '' to change known ones alone, 4 fence or '', 5 state that a known
--       one has to be in or '', 6 '1' to forget what its cache held, 7 fields of its description, 8 more about it, as JSON
-- Reply 1, or 0 if it is unknown and was to be changed, or not in that state; error FENCED
local now_ms, id, instance = store_now_ms(), ARGV[2], read_instance(ARGV[2])
local refused, former_state = fence_error(ARGV[4], now_ms), instance and instance.described.state
if refused then
  return refused
elseif (not instance and ARGV[3] == '') or (ARGV[5] ~= '' and former_state ~= ARGV[5]) then
  return 0
end
local former_role = instance and instance.described.role
local described = instance and instance.described or { state = ARGV[3] }
local about = instance and cjson.decode(redis.call('HGET', keys.instance .. id, 'about')) or {}
local changed = redis.call('SADD', keys.instances, id) == 1
for place, fields in ipairs({ described, about }) do
  for name, value in pairs(cjson.decode(ARGV[6 + place])) do
    changed = changed or fields[name] ~= value
    fields[name] = value
  end
end
if not instance then
  described.tokens_per_s = about.prefill_tokens_per_s
  instance = {
    id = id, described = described, texts = {}, pending_tokens = 0, dispatched_tokens = 0, deferred_tokens = 0,
    passed_over_tokens = 0, context_tokens = 0, queued_requests = 0, running_requests = 0, cached_blocks = 0,
    assigned_tokens = 0, last_prefill_ms = 0, work_since_ms = 0, kv_stamp = 0, version = 0,
  }
end
if not former_state or ARGV[6] == '1' then
  redis.call('DEL', keys.kv .. id)
  forget_events(id)
  instance.cached_blocks = 0
elseif not changed then
  return 1
end
if former_state and former_state ~= described.state and instance.pending_tokens > 0 then
  instance.work_since_ms = now_ms
end
redis.call('HINCRBY', keys.meta, 'epoch', changed and 1 or 0)
if former_role and former_role ~= described.role then
  redis.call('ZREM', keys.least_loaded .. former_role, id)
end
write_fields(id, 'description', described)
write_fields(id, 'about', about)
write_instance(instance)
return 1
