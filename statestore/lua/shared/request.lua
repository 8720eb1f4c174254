-- include: instance
-- How a live request counts on its instance in each of its states; docs/reference/redis-keys.md lists its fields.

-- Nil where there is no such request.
local function read_request(key)
  local values = redis.call('HMGET', key, 'instance_id', 'replica_id', 'state', 'attempt', 'uncached_tokens',
    'prompt_tokens', 'expected_output_tokens', 'deferred', 'enqueued_ms', 'dispatched_ms')
  return values[1] and {
    instance_id = values[1], replica_id = values[2], state = values[3], attempt = tonumber(values[4]),
    uncached_tokens = tonumber(values[5]), prompt_tokens = tonumber(values[6]),
    context_tokens = values[6] + values[7], deferred = values[8] == '1',
    enqueued_ms = tonumber(values[9]), dispatched_ms = tonumber(values[10] or 0),
  } or nil
end

-- The chain of a held request, packed; nil for one whose chain is unknown.
local function read_chain(key)
  local hashes, block_tokens = unpack(redis.call('HMGET', key, 'chain', 'block_tokens'))
  return hashes and { hashes = hashes, block_tokens = tonumber(block_tokens) } or nil
end

-- How a held request is listed: what a plan has to know of it, in one text.
local function listed_as(request_id, request)
  return string.format('%s %d', request_id, request.uncached_tokens)
end

local function count(instance, request, sign)
  local tokens = sign * request.uncached_tokens
  if request.state ~= 'prefilled' then
    instance.pending_tokens = instance.pending_tokens + tokens
  end
  if request.state == 'held' then
    instance.queued_requests = instance.queued_requests + sign
    instance.deferred_tokens = instance.deferred_tokens + (request.deferred and tokens or 0)
    return
  end
  instance.dispatched_tokens = instance.dispatched_tokens + (request.state == 'dispatched' and tokens or 0)
  instance.running_requests = instance.running_requests + sign
  instance.context_tokens = instance.context_tokens + sign * request.context_tokens
end

-- Counts and lists a request on an instance.
local function enter(instance, request_id, request, rank, now_ms)
  local had_work = instance.pending_tokens > instance.deferred_tokens
  count(instance, request, 1)
  if not had_work and instance.pending_tokens > instance.deferred_tokens then
    instance.work_since_ms = now_ms
  end
  if request.state == 'held' then
    redis.call('ZADD', instance.queue_key, rank, listed_as(request_id, request))
  else
    redis.call('ZADD', instance.running_key, request.dispatched_ms, request_id)
  end
end

-- The reverse.
local function leave(instance, request_id, request)
  count(instance, request, -1)
  if request.state == 'held' then
    redis.call('ZREM', instance.queue_key, listed_as(request_id, request))
  else
    redis.call('ZREM', instance.running_key, request_id)
  end
end
