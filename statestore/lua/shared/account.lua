-- include: terms
-- One instance's account: five keys in a row, KEYS[first] to KEYS[first + 4], see docs/redis-keys.md. Read once, changed
-- as a table, written once, which keeps up the ranking that is the last of KEYS.
local lightest_key = KEYS[#KEYS]

local function read_account(first, instance_id)
  local values = redis.call('HMGET', KEYS[first],
    'state', 'dispatch_window_tokens', 'max_running_requests', 'max_queued_requests', 'kv_capacity_tokens',
    'pending_tokens', 'dispatched_tokens', 'context_tokens', 'window_tokens', 'window_ms',
    'rate_tokens', 'rate_busy_s', 'last_prefill_ms', 'work_since_ms', 'kv_stamp', 'late_tokens', 'late_requests', 'aside_tokens',
    'role', 'overdue_work_ms', 'overdue_at_ms')
  if not values[1] then
    return nil
  end
  return {
    id = instance_id,
    key = KEYS[first],
    queue_key = KEYS[first + 1],
    running_key = KEYS[first + 2],
    kv_key = KEYS[first + 3],
    late_key = KEYS[first + 4],
    state = values[1],
    dispatch_window_tokens = tonumber(values[2]),
    max_running_requests = tonumber(values[3]),
    max_queued_requests = tonumber(values[4]),
    kv_capacity_tokens = tonumber(values[5]),
    pending_tokens = tonumber(values[6]),
    dispatched_tokens = tonumber(values[7]),
    context_tokens = tonumber(values[8]),
    window_tokens = tonumber(values[9]),
    window_ms = tonumber(values[10]),
    rate_tokens = tonumber(values[11]),
    rate_busy_s = tonumber(values[12]),
    last_prefill_ms = tonumber(values[13]),
    work_since_ms = tonumber(values[14]),
    kv_stamp = tonumber(values[15]),
    late_tokens = tonumber(values[16]),
    late_requests = tonumber(values[17]),
    aside_tokens = tonumber(values[18]),
    role = values[19],
    overdue_work_ms = tonumber(values[20]),
    overdue_at_ms = tonumber(values[21]),
  }
end

-- All digits of a number that may be broken, in one notation on every server.
local function exact(number)
  return string.format('%.17g', number)
end

-- The learned prefill rate; twin of PrefillRate.tokens_per_s.
local function tokens_per_s(account)
  return math.max(1, account.rate_tokens / account.rate_busy_s)
end

-- Context tokens of running requests over KV memory; twin of kv_demand in scheduling/instance.py.
local function kv_demand(account)
  return account.context_tokens / math.max(1, account.kv_capacity_tokens)
end

-- Pending tokens but for those of held requests that stepped behind: what the instance is to prefill now.
local function on_time_tokens(account)
  return account.pending_tokens - account.late_tokens
end

-- The part of the pending tokens that a new request on time need not wait for; twin of scheduling/queue_order.py.
local function behind_tokens(account)
  local waiting = account.pending_tokens - account.dispatched_tokens - account.late_tokens
  return account.late_tokens + math.min(account.aside_tokens, waiting)
end

-- Whether new requests may be placed on the instance, or held ones moved there; twin of scheduling/view.py.
local function takes_requests(account)
  return account.state == 'ready' and account.role ~= 'decode'
end

-- What an instance has to do, in seconds; twin of work_s in scheduling/ttft.py.
local function work_s(account)
  local on_time_s = (account.pending_tokens - behind_tokens(account)) / tokens_per_s(account)
  return on_time_s + kv_weight_s * kv_demand(account)
end

-- Keeps the ranking of instances that take requests by what they have to do; twin of statestore/ledger/horizon.py.
local function rank_account(account)
  if not takes_requests(account) then
    redis.call('ZREM', lightest_key, account.id)
    return
  end
  redis.call('ZADD', lightest_key, exact(work_s(account)), account.id)
end

local function write_account(account)
  redis.call('HSET', account.key,
    'pending_tokens', account.pending_tokens,
    'dispatched_tokens', account.dispatched_tokens,
    'context_tokens', account.context_tokens,
    'window_tokens', exact(account.window_tokens),
    'window_ms', account.window_ms,
    'rate_tokens', exact(account.rate_tokens),
    'rate_busy_s', exact(account.rate_busy_s),
    'last_prefill_ms', account.last_prefill_ms,
    'work_since_ms', account.work_since_ms,
    'kv_stamp', account.kv_stamp,
    'late_tokens', account.late_tokens,
    'late_requests', account.late_requests,
    'aside_tokens', account.aside_tokens)
  rank_account(account)
end

local function held_requests(account)
  return redis.call('ZCARD', account.queue_key) + account.late_requests
end

-- Whether the instance is given its held requests at all. A draining one finishes what is queued on it.
local function serves(account)
  return account.state == 'ready' or account.state == 'draining'
end

-- Whether one more request may be dispatched, with so many dispatch windows to fill (one if not said).
local function has_room(account, windows)
  return serves(account)
    and account.dispatched_tokens < (windows or 1) * account.dispatch_window_tokens
    and redis.call('ZCARD', account.running_key) < account.max_running_requests
end
