-- include: terms
-- include: kv
-- Live requests: JSON records in one hash, the chains of those held in another, the last of KEYS but one, and how each
-- state counts in its instance's account.
local chains_key = KEYS[#KEYS - 1]

local function read_request(requests_key, request_id)
  local text = redis.call('HGET', requests_key, request_id)
  return text and cjson.decode(text) or nil
end

local function write_request(requests_key, request)
  redis.call('HSET', requests_key, request.request_id, cjson.encode(request))
end

-- False for who has none: those of adopted requests are unknown.
local function read_chains(request_ids)
  return redis.call('HMGET', chains_key, unpack(request_ids))
end

local function keep_chain(request_id, chain)
  redis.call('HSET', chains_key, request_id, chain)
end

local function forget_chain(request_id)
  redis.call('HDEL', chains_key, request_id)
end

local function forget_request(requests_key, request_id)
  redis.call('HDEL', requests_key, request_id)
  forget_chain(request_id)
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

local function work_comes(account, now_ms)
  if on_time_tokens(account) == 0 then
    account.work_since_ms = now_ms
  end
end

local function enter(account, request, now_ms)
  if request.state ~= 'prefilled' then
    if not (request.state == 'held' and request.late) then
      work_comes(account, now_ms)
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

local function count_anew(account, request, uncached_tokens)
  local more_tokens = uncached_tokens - request.uncached_tokens
  request.uncached_tokens = uncached_tokens
  account.pending_tokens = account.pending_tokens + more_tokens
  if request.late then
    account.late_tokens = account.late_tokens + more_tokens
  end
end

-- Counts a held request anew by what its instance has been given; without a chain it keeps its count.
local function count_by_given(account, request, chain)
  if chain then
    count_anew(account, request, uncached_tokens_now(account, chain, request))
  end
end

-- Counts a held request as the instance's own from now on; returns its chain, false if that is unknown.
local function dispatch(account, request, now_ms)
  local chain = read_chains({ request.request_id })[1]
  count_by_given(account, request, chain)
  if chain then
    stamp_chain(account, chain, request.block_tokens, #chain / 8)
    forget_chain(request.request_id)
  end
  if request.late then
    work_comes(account, now_ms)
  end
  delist(account, request)
  request.state = 'dispatched'
  request.dispatched_ms = now_ms
  account.dispatched_tokens = account.dispatched_tokens + request.uncached_tokens
  account.context_tokens = account.context_tokens + request.prompt_tokens + request.expected_output_tokens
  redis.call('ZADD', account.running_key, now_ms, request.request_id)
  return chain
end
