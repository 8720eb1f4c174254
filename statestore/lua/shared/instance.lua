-- One instance: its description and its load, each as JSON in a field of its key (docs/reference/redis-keys.md). Read
-- once, changed as a table, written once. Every change grows its version, by which plans are committed.

-- Nil where there is no such instance. Its description and load stay in texts as they are stored.
local function read_instance(id)
  local texts = redis.call('HMGET', keys.instance .. id, 'description', 'load')
  if not texts[1] then
    return nil
  end
  local instance = cjson.decode(texts[2])
  instance.id, instance.described, instance.texts = id, cjson.decode(texts[1]), texts
  return instance
end

-- The same, kept for the rest of the script.
local function read_once(instances, id)
  instances[id] = instances[id] or read_instance(id)
  return instances[id]
end

-- The role that cannot serve a leg (scheduling/legs.py).
local OTHER_ROLE = { prefill = 'decode', decode = 'prefill' }

local function takes_requests(instance, leg)
  return instance.described.state == 'ready' and instance.described.role ~= OTHER_ROLE[leg or 'whole']
end

local function has_room(instance, windows)
  local described = instance.described
  return (described.state == 'ready' or described.state == 'draining')
    and instance.dispatched_tokens < (windows or 1) * described.dispatch_window_tokens
    and instance.running_requests < described.max_running_requests
end

-- Whether one more may be dispatched as no deadline is at stake: all work, so many more tokens included, is done by then.
local function is_calm(instance, tokens, deadline_ms, now_ms)
  return instance.deferred_tokens == 0 and has_room(instance, terms.calm_windows)
    and now_ms + (instance.pending_tokens + tokens) * 1000 / instance.described.tokens_per_s <= deadline_ms
end

-- What a new request on time need not wait for: what is deferred, and what the last plan passed over, while it is held.
local function overtaken_tokens(instance)
  local held_tokens = instance.pending_tokens - instance.dispatched_tokens - instance.deferred_tokens
  return instance.deferred_tokens + math.min(instance.passed_over_tokens, held_tokens)
end

local function write_load(instance)
  instance.texts[2] = string.format('{"pending_tokens":%d,"dispatched_tokens":%d,"deferred_tokens":%d,'
    .. '"passed_over_tokens":%d,"context_tokens":%d,"queued_requests":%d,"running_requests":%d,"cached_blocks":%d,'
    .. '"assigned_tokens":%d,"last_prefill_ms":%d,"work_since_ms":%d,"kv_stamp":%d,"version":%d}',
    instance.pending_tokens, instance.dispatched_tokens, instance.deferred_tokens, instance.passed_over_tokens,
    instance.context_tokens, instance.queued_requests, instance.running_requests, instance.cached_blocks,
    instance.assigned_tokens, instance.last_prefill_ms, instance.work_since_ms, instance.kv_stamp, instance.version)
  redis.call('HSET', keys.instance .. instance.id, 'load', instance.texts[2])
end

-- Also its rank among the least loaded of its role: seconds of prefill on time, and what KV memory in use counts for.
local function write_instance(instance)
  local id, described = instance.id, instance.described
  instance.version = instance.version + 1
  write_load(instance)
  if takes_requests(instance) then
    local ahead_s = (instance.pending_tokens - overtaken_tokens(instance)) / described.tokens_per_s
    local work_s = ahead_s + terms.kv_weight_s * (instance.context_tokens / described.kv_capacity_tokens)
    redis.call('ZADD', keys.least_loaded .. described.role, work_s, id)
  else
    redis.call('ZREM', keys.least_loaded .. described.role, id)
  end
end

-- For a reply, as JSON: its description and load as they are stored, and a hit.
local function instance_json(instance, hit)
  return '[' .. instance.texts[1] .. ',' .. instance.texts[2] .. ',' .. hit .. ']'
end

-- A queue head for a planner, as JSON: [instance id, now ms, the instance, ["REQUEST_ID UNCACHED_TOKENS", rank, …]], its
-- queue in order up to what one plan looks at.
local function queue_json(instance, now_ms)
  local queue = redis.call('ZRANGE', keys.queue .. instance.id, 0, terms.plan_limit - 1, 'WITHSCORES')
  for place = 1, #queue, 2 do
    queue[place] = '"' .. queue[place] .. '"'
  end
  return '["' .. instance.id .. '",' .. now_ms .. ',' .. instance_json(instance, 0) .. ',[' .. table.concat(queue, ',') .. ']]'
end

-- The same where requests wait and one may be dispatched; else 'null'.
local function room_json(instance, now_ms)
  if instance.queued_requests == 0 then
    return 'null'
  end
  local told = has_room(instance)
  if not told then
    local first = redis.call('ZRANGE', keys.queue .. instance.id, 0, 0, 'WITHSCORES')
    told = first[2] and is_calm(instance, 0, tonumber(first[2]), now_ms)
  end
  return told and queue_json(instance, now_ms) or 'null'
end
