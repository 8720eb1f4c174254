-- One instance's account: four keys in a row, KEYS[first] to KEYS[first + 3], see docs/redis-keys.md.
-- Read once, changed as a table, written once.
local function read_account(first, instance_id)
  local values = redis.call('HMGET', KEYS[first],
    'state', 'dispatch_window_tokens', 'max_running_requests', 'max_queued_requests', 'kv_capacity_tokens',
    'pending_tokens', 'dispatched_tokens', 'context_tokens', 'window_tokens', 'window_ms',
    'rate_tokens', 'rate_busy_s', 'last_prefill_ms', 'work_since_ms', 'kv_stamp')
  if not values[1] then
    return nil
  end
  return {
    id = instance_id,
    key = KEYS[first],
    queue_key = KEYS[first + 1],
    running_key = KEYS[first + 2],
    kv_key = KEYS[first + 3],
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
  }
end

-- All digits of a number that may be broken, in one notation on every server.
local function exact(number)
  return string.format('%.17g', number)
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
    'kv_stamp', account.kv_stamp)
end

local function queued_requests(account)
  return redis.call('ZCARD', account.queue_key)
end

-- Whether one more request may be dispatched. A draining instance finishes what is queued on it.
local function has_room(account)
  return (account.state == 'ready' or account.state == 'draining')
    and account.dispatched_tokens < account.dispatch_window_tokens
    and redis.call('ZCARD', account.running_key) < account.max_running_requests
end
