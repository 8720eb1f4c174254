-- include: terms
-- One instance: four keys in a row from KEYS[first], see docs/reference/redis-keys.md. Read once, changed as a table, written once.
-- Every change grows its version, by which plans are committed.

-- Nil where there is no such instance. Its fields stay in stored as they were read.
local function read_instance(first)
  local v = redis.call('HMGET', KEYS[first], 'state', 'role', 'tokens_per_s', 'kv_capacity_tokens',
    'dispatch_window_tokens', 'max_running_requests', 'max_queued_requests', 'pending_tokens', 'dispatched_tokens',
    'deferred_tokens', 'passed_over_tokens', 'context_tokens', 'queued_requests', 'running_requests', 'cached_blocks', 'assigned_tokens',
    'last_prefill_ms', 'work_since_ms', 'kv_stamp', 'version')
  return v[1] and {
    first = first, key = KEYS[first], queue_key = KEYS[first + 1], running_key = KEYS[first + 2], kv_key = KEYS[first + 3],
    stored = v, state = v[1], role = v[2], tokens_per_s = tonumber(v[3]), kv_capacity_tokens = tonumber(v[4]),
    dispatch_window_tokens = tonumber(v[5]), max_running_requests = tonumber(v[6]), max_queued_requests = tonumber(v[7]),
    pending_tokens = tonumber(v[8]), dispatched_tokens = tonumber(v[9]), deferred_tokens = tonumber(v[10]),
    passed_over_tokens = tonumber(v[11]), context_tokens = tonumber(v[12]), queued_requests = tonumber(v[13]),
    running_requests = tonumber(v[14]), cached_blocks = tonumber(v[15]), assigned_tokens = tonumber(v[16]),
    last_prefill_ms = tonumber(v[17]), work_since_ms = tonumber(v[18]), kv_stamp = tonumber(v[19]), version = tonumber(v[20]),
  } or nil
end

local function takes_requests(instance)
  return instance.state == 'ready' and instance.role ~= 'decode'
end

local function has_room(instance)
  return (instance.state == 'ready' or instance.state == 'draining')
    and instance.dispatched_tokens < instance.dispatch_window_tokens
    and instance.running_requests < instance.max_running_requests
end

-- What a new request on time need not wait for: what is deferred, and what the last plan passed over, while it is held.
local function overtaken_tokens(instance)
  local held_tokens = instance.pending_tokens - instance.dispatched_tokens - instance.deferred_tokens
  return instance.deferred_tokens + math.min(instance.passed_over_tokens, held_tokens)
end

local function write_counts(instance)
  redis.call('HSET', instance.key, 'pending_tokens', instance.pending_tokens,
    'dispatched_tokens', instance.dispatched_tokens, 'deferred_tokens', instance.deferred_tokens,
    'passed_over_tokens', instance.passed_over_tokens,
    'context_tokens', instance.context_tokens, 'queued_requests', instance.queued_requests,
    'running_requests', instance.running_requests, 'cached_blocks', instance.cached_blocks,
    'assigned_tokens', instance.assigned_tokens, 'last_prefill_ms', instance.last_prefill_ms,
    'work_since_ms', instance.work_since_ms, 'kv_stamp', instance.kv_stamp, 'version', instance.version)
end

-- Also its rank among the least loaded: seconds of prefill on time, and what KV memory in use counts for.
local function write_instance(instance, id, least_loaded_key)
  instance.version = instance.version + 1
  write_counts(instance)
  if takes_requests(instance) then
    local ahead_s = (instance.pending_tokens - overtaken_tokens(instance)) / instance.tokens_per_s
    local work_s = ahead_s + terms.kv_weight_s * (instance.context_tokens / instance.kv_capacity_tokens)
    redis.call('ZADD', least_loaded_key, string.format('%.17g', work_s), id)
  else
    redis.call('ZREM', least_loaded_key, id)
  end
end

-- Its fields as they were read, in their order, and a hit, as JSON.
local function instance_json(instance, hit)
  return '["' .. instance.state .. '","' .. instance.role .. '",' .. table.concat(instance.stored, ',', 3) .. ',' .. hit .. ']'
end

-- A queue head for a planner, as JSON: [now ms, the instance's figures, ["REQUEST_ID UNCACHED_TOKENS", rank, …]], its queue in
-- order up to what one plan looks at. All as it is written: FIRST is the instance's place in KEYS.
local function queue_json(first, now_ms)
  local instance = read_instance(first)
  local queue = redis.call('ZRANGE', instance.queue_key, 0, terms.plan_limit - 1, 'WITHSCORES')
  for place = 1, #queue, 2 do
    queue[place] = '"' .. queue[place] .. '"'
  end
  return '[' .. now_ms .. ',' .. instance_json(instance, 0) .. ',[' .. table.concat(queue, ',') .. ']]'
end

-- The same where requests wait and one may be dispatched; else 'null'.
local function room_json(instance, now_ms)
  return instance.queued_requests > 0 and has_room(instance) and queue_json(instance.first, now_ms) or 'null'
end
