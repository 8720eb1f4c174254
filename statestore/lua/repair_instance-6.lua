-- Recomputes an instance's sums from its requests and drops entries of requests that are not its own any more.
-- KEYS  1 leader, 2 requests, 3-6 account, queue, running, kv of the instance
-- ARGV  1 test clock ms or '', 2 grants channel, 3 instance id, 4 fence
-- Reply 1 if anything was off, else 0; error FENCED
-- Clock the server's
-- include: clock
-- include: fence
-- include: grants
local now_ms = store_now_ms()
local refused = fence_error(KEYS[1], ARGV[4], now_ms)
if refused then
  return refused
end
local account = read_account(3, ARGV[3])
if not account then
  return 0
end
local pending, dispatched, context, dropped = 0, 0, 0, 0

local function count(list_key, held)
  for _, request_id in ipairs(redis.call('ZRANGE', list_key, 0, -1)) do
    local request = read_request(KEYS[2], request_id)
    if not request or request.instance_id ~= ARGV[3] or (request.state == 'held') ~= held then
      dropped = dropped + redis.call('ZREM', list_key, request_id)
    else
      if request.state ~= 'prefilled' then
        pending = pending + request.uncached_tokens
      end
      if request.state == 'dispatched' then
        dispatched = dispatched + request.uncached_tokens
      end
      if not held then
        context = context + request.prompt_tokens + request.expected_output_tokens
      end
    end
  end
end

count(account.queue_key, true)
count(account.running_key, false)
local off = dropped > 0 or pending ~= account.pending_tokens or dispatched ~= account.dispatched_tokens
  or context ~= account.context_tokens
account.pending_tokens, account.dispatched_tokens, account.context_tokens = pending, dispatched, context
grant_next(KEYS[2], account, now_ms)
write_account(account)
return off and 1 or 0
