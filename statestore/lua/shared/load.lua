-- What a reader needs to know an instance's load: the raw figures, since the reader has the rules to interpret them.
local function read_load(first)
  local load = redis.call('HMGET', KEYS[first],
    'state', 'pending_tokens', 'dispatched_tokens', 'context_tokens', 'window_tokens', 'window_ms',
    'rate_tokens', 'rate_busy_s', 'last_prefill_ms', 'work_since_ms', 'kv_capacity_tokens', 'late_tokens', 'late_requests')
  if not load[1] then
    return nil
  end
  load[#load + 1] = redis.call('ZCARD', KEYS[first + 1])
  load[#load + 1] = redis.call('ZCARD', KEYS[first + 2])
  load[#load + 1] = redis.call('ZCARD', KEYS[first + 3])
  return load
end
