-- include: json_list
-- What a reader needs to know an instance's load: the raw figures, since the reader has the rules to interpret them. In
-- JSON, which a reader parses at once and without a conversion for every figure. What is stored is written as it is, so
-- that no digit is lost.

-- Where some of the texts of a stored load are.
local STATE, PENDING_TOKENS, CONTEXT_TOKENS, RATE_TOKENS, RATE_BUSY_S, KV_CAPACITY_TOKENS, TTFT_WEIGHTS =
  1, 2, 4, 7, 8, 11, 15

-- The texts of an instance's load as they are stored; nil where there is no instance.
local function stored_load(first)
  local stored = redis.call('HMGET', KEYS[first],
    'state', 'pending_tokens', 'dispatched_tokens', 'context_tokens', 'window_tokens', 'window_ms',
    'rate_tokens', 'rate_busy_s', 'last_prefill_ms', 'work_since_ms', 'kv_capacity_tokens', 'late_tokens', 'late_requests',
    'aside_tokens', 'ttft_weights')
  return stored[STATE] and stored or nil
end

local function load_json(stored, first, hit)
  if not stored then
    return 'null'
  end
  local load = { unpack(stored) }
  load[STATE] = cjson.encode(stored[STATE])
  load[TTFT_WEIGHTS] = stored[TTFT_WEIGHTS] or 'null'
  for place = 1, 3 do
    load[#load + 1] = redis.call('ZCARD', KEYS[first + place])
  end
  load[#load + 1] = hit
  return json_list(load)
end

local function read_load(first, hit)
  return load_json(stored_load(first), first, hit)
end
