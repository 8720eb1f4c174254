-- Adds an instance, or changes the description or the state of a known one; its figures stay. One whose key is gone, by
-- eviction or by hand, is added with an empty cache.
-- KEYS  1 meta, 2 instances, 3 leader, 4-7 instance, 8 least loaded, 9 record of its KV events, 10 their names
-- ARGV  1 clock, 2 instance id, 3 state of a new one or '' to change known ones alone, 4 fence or '', 5 state that a known
--       one has to be in or '', 6 '1' to forget what its cache held, 7.. name, value, …
-- Reply 1, or 0 if it is unknown and was to be changed, or not in that state; error FENCED
-- include: clock, instance, kv_events, leases
local now_ms, former = store_now_ms(), redis.call('HGET', KEYS[4], 'state')
local refused = fence_error(KEYS[3], ARGV[4], now_ms)
if refused then
  return refused
elseif (not former and ARGV[3] == '') or (ARGV[5] ~= '' and former ~= ARGV[5]) then
  return 0
end
local changed = redis.call('SADD', KEYS[2], ARGV[2]) == 1
for place = 7, #ARGV, 2 do
  if redis.call('HGET', KEYS[4], ARGV[place]) ~= ARGV[place + 1] then
    redis.call('HSET', KEYS[4], ARGV[place], ARGV[place + 1])
    changed = true
  end
end
if not former then
  redis.call('HSET', KEYS[4], 'state', ARGV[3], 'tokens_per_s', redis.call('HGET', KEYS[4], 'prefill_tokens_per_s'))
  write_counts({
    key = KEYS[4], pending_tokens = 0, dispatched_tokens = 0, deferred_tokens = 0, passed_over_tokens = 0, context_tokens = 0,
    queued_requests = 0, running_requests = 0, cached_blocks = 0, assigned_tokens = 0, last_prefill_ms = 0,
    work_since_ms = 0, kv_stamp = 0, version = 0,
  })
end
local instance = read_instance(4)
if not former or ARGV[6] == '1' then
  redis.call('DEL', instance.kv_key)
  forget_events(KEYS[9], KEYS[10])
  instance.cached_blocks = 0
elseif not changed then
  return 1
end
if former and former ~= instance.state and instance.pending_tokens > 0 then
  instance.work_since_ms = now_ms
end
redis.call('HINCRBY', KEYS[1], 'epoch', changed and 1 or 0)
write_instance(instance, ARGV[2], KEYS[8])
return 1
