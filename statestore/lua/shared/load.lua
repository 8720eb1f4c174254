-- include: json_list
-- What a reader needs to know an instance's load: the raw figures, since the reader has the rules to interpret them. In
-- JSON, which a reader parses at once and without a conversion for every figure. What is stored is written as it is, so
-- that no digit is lost.

-- Where some of the figures of a stored load are.
local STATE, PENDING_TOKENS, CONTEXT_TOKENS, RATE_TOKENS, RATE_BUSY_S, KV_CAPACITY_TOKENS, TTFT_WEIGHTS, CACHED_BLOCKS =
  1, 2, 4, 7, 8, 11, 15, 18

-- The figures of an instance's load as they are stored, queued, running and cached counted behind them; nil where there
-- is no instance.
local function stored_load(first)
  local stored = redis.call('HMGET', KEYS[first],
    'state', 'pending_tokens', 'dispatched_tokens', 'context_tokens', 'window_tokens', 'window_ms',
    'rate_tokens', 'rate_busy_s', 'last_prefill_ms', 'work_since_ms', 'kv_capacity_tokens', 'late_tokens', 'late_requests',
    'aside_tokens', 'ttft_weights')
  if not stored[STATE] then
    return nil
  end
  for place = 1, 3 do
    stored[#stored + 1] = redis.call('ZCARD', KEYS[first + place])
  end
  return stored
end

local function load_json(stored, hit)
  if not stored then
    return 'null'
  end
  local load = { unpack(stored) }
  load[STATE] = cjson.encode(stored[STATE])
  load[TTFT_WEIGHTS] = stored[TTFT_WEIGHTS] or 'null'
  load[#load + 1] = hit
  return json_list(load)
end

local function read_load(first, hit)
  return load_json(stored_load(first), hit)
end
