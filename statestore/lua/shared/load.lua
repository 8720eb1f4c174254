-- include: json_list
-- What a reader needs to know an instance's load: the raw figures, since the reader has the rules to interpret them. In
-- JSON, which a reader parses at once and without a conversion for every figure. What is stored is written as it is, so
-- that no digit is lost.
local function read_load(first, hit)
  local load = redis.call('HMGET', KEYS[first],
    'state', 'pending_tokens', 'dispatched_tokens', 'context_tokens', 'window_tokens', 'window_ms',
    'rate_tokens', 'rate_busy_s', 'last_prefill_ms', 'work_since_ms', 'kv_capacity_tokens', 'late_tokens', 'late_requests',
    'aside_tokens', 'ttft_weights')
  if not load[1] then
    return 'null'
  end
  load[1] = cjson.encode(load[1])
  load[15] = load[15] or 'null'
  for place = 1, 3 do
    load[#load + 1] = redis.call('ZCARD', KEYS[first + place])
  end
  load[#load + 1] = hit
  return json_list(load)
end
