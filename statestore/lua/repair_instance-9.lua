-- Recomputes an instance's sums from its requests, drops entries of requests that are not its own any more, and lists
-- held ones as the order of today says. Times ahead of the clock, which somebody set back, become now: held requests
-- wait from now on, and a stall begins now.
-- KEYS  1 leader, 2 requests, 3-7 account, queue, running, kv, late of the instance, 8 chains of held requests,
--       9 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 instance id, 4 fence
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
local pending, dispatched, late, late_requests, context, misplaced = 0, 0, 0, 0, 0, 0

-- Lists a held request where today's order has it, under the score of today; returns that list.
local function relist(list_key, request)
  local well_key, score, ahead = account.queue_key, request.sequence, request.enqueued_ms > now_ms
  request.enqueued_ms = math.min(request.enqueued_ms, now_ms)
  request.late = by_deadline and request.late or false
  if request.late then
    well_key = account.late_key
  elseif by_deadline then
    score = request.enqueued_ms + request.slo_ms
  end
  if not ahead and list_key == well_key and tonumber(redis.call('ZSCORE', list_key, request.request_id)) == score then
    return well_key
  end
  redis.call('ZREM', list_key, request.request_id)
  list(account, request)
  write_request(KEYS[2], request)
  misplaced = misplaced + (ahead and 0 or 1)
  return well_key
end

local listed_in = {}

local function count(list_key, request_ids, held)
  for _, request_id in ipairs(request_ids) do
    local request = read_request(KEYS[2], request_id)
    local elsewhere = listed_in[request_id]
    if not request then
      forget_chain(request_id)
    end
    if not request or request.instance_id ~= ARGV[3] or (request.state == 'held') ~= held then
      misplaced = misplaced + redis.call('ZREM', list_key, request_id)
    elseif elsewhere then
      misplaced = misplaced + (elsewhere ~= list_key and redis.call('ZREM', list_key, request_id) or 0)
    else
      listed_in[request_id] = list_key
      if held then
        listed_in[request_id] = relist(list_key, request)
        if request.late then
          late = late + request.uncached_tokens
          late_requests = late_requests + 1
        end
      end
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

local kept_late, kept_late_requests = account.late_tokens, account.late_requests
local queued_ids = redis.call('ZRANGE', account.queue_key, 0, -1)
local late_ids = redis.call('ZRANGE', account.late_key, 0, -1)
count(account.queue_key, queued_ids, true)
count(account.late_key, late_ids, true)
count(account.running_key, redis.call('ZRANGE', account.running_key, 0, -1), false)
local off = misplaced > 0 or pending ~= account.pending_tokens or dispatched ~= account.dispatched_tokens
  or late ~= kept_late or late_requests ~= kept_late_requests or context ~= account.context_tokens
account.pending_tokens, account.dispatched_tokens = pending, dispatched
account.late_tokens, account.late_requests, account.context_tokens = late, late_requests, context
account.last_prefill_ms = math.min(account.last_prefill_ms, now_ms)
account.work_since_ms = math.min(account.work_since_ms, now_ms)
if account.overdue_at_ms > now_ms then
  redis.call('HSET', account.key, 'overdue_at_ms', now_ms)
  account.overdue_at_ms = now_ms
end
grant_next(KEYS[2], account, now_ms)
write_account(account)
return off and 1 or 0
