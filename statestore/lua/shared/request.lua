-- include: terms
-- Live requests: JSON records in one hash, and how each state counts in its instance's account.
local function read_request(requests_key, request_id)
  local text = redis.call('HGET', requests_key, request_id)
  return text and cjson.decode(text) or nil
end

local function write_request(requests_key, request)
  redis.call('HSET', requests_key, request.request_id, cjson.encode(request))
end

-- Held requests are listed by rank, those that stepped behind by age.
local function list(account, request)
  if request.late then
    redis.call('ZADD', account.late_key, request.sequence, request.request_id)
    account.late_tokens = account.late_tokens + request.uncached_tokens
    account.late_requests = account.late_requests + 1
    return
  end
  local rank = by_deadline and request.enqueued_ms + request.slo_ms or request.sequence
  redis.call('ZADD', account.queue_key, rank, request.request_id)
end

local function delist(account, request)
  if request.late then
    redis.call('ZREM', account.late_key, request.request_id)
    account.late_tokens = account.late_tokens - request.uncached_tokens
    account.late_requests = account.late_requests - 1
    return
  end
  redis.call('ZREM', account.queue_key, request.request_id)
end

local function enter(account, request, now_ms)
  if request.state ~= 'prefilled' then
    if account.pending_tokens == 0 then
      account.work_since_ms = now_ms
    end
    account.pending_tokens = account.pending_tokens + request.uncached_tokens
  end
  if request.state == 'held' then
    list(account, request)
    return
  end
  if request.state == 'dispatched' then
    account.dispatched_tokens = account.dispatched_tokens + request.uncached_tokens
  end
  account.context_tokens = account.context_tokens + request.prompt_tokens + request.expected_output_tokens
  redis.call('ZADD', account.running_key, request.dispatched_ms, request.request_id)
end

local function leave(account, request)
  if request.state ~= 'prefilled' then
    account.pending_tokens = account.pending_tokens - request.uncached_tokens
  end
  if request.state == 'held' then
    delist(account, request)
    return
  end
  if request.state == 'dispatched' then
    account.dispatched_tokens = account.dispatched_tokens - request.uncached_tokens
  end
  account.context_tokens = account.context_tokens - request.prompt_tokens - request.expected_output_tokens
  redis.call('ZREM', account.running_key, request.request_id)
end

local function dispatch(account, request, now_ms)
  delist(account, request)
  request.state = 'dispatched'
  request.dispatched_ms = now_ms
  account.dispatched_tokens = account.dispatched_tokens + request.uncached_tokens
  account.context_tokens = account.context_tokens + request.prompt_tokens + request.expected_output_tokens
  redis.call('ZADD', account.running_key, now_ms, request.request_id)
end
