-- Queues a request on an instance, counts its tokens, dispatches it at once if there is room.
-- KEYS  1 meta, 2 requests, 3 replicas, 4 arrivals, 5 wanted rebalances,
--       6 holders of the new generation, 7 of the old, 8-12 account, queue, running, kv, late of the instance,
--       13-17 the same of the former attempt's instance, 18 chains of held requests, 19 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 request as JSON, 4 chain, packed,
--       5 pending tokens the decision saw or '', 6 tolerance tokens, 7 '1' to ask for a rebalance,
--       8 id of the former attempt's instance (the instance itself if there is none),
--       9 arrival log entries, 10 arrival head bytes,
--       11 marks of the chain, packed, or '' to remember no holders, 12 marks of a generation at most
-- Reply {status, queue position} | {'moved', instance id of the former attempt}
-- Clock the server's
-- include: clock
-- include: placing
local now_ms = store_now_ms()
local requests_key = KEYS[2]
local request, chain = cjson.decode(ARGV[3]), ARGV[4]
local books = {
  meta_key = KEYS[1], requests_key = KEYS[2], replicas_key = KEYS[3], arrivals_key = KEYS[4], new_holders_key = KEYS[6],
  old_holders_key = KEYS[7], chain = chain, marks = ARGV[11], arrivals = ARGV[9], head_bytes = tonumber(ARGV[10]),
  max_marks = tonumber(ARGV[12]),
}
local seen_tokens, tolerance_tokens = tonumber(ARGV[5]), tonumber(ARGV[6])

local function standing(account, known)
  if known.state ~= 'held' then
    return { 'dispatched', 0 }
  end
  if known.late then
    local ahead = redis.call('ZCARD', account.queue_key)
    return { 'held', ahead + redis.call('ZRANK', account.late_key, known.request_id) }
  end
  return { 'held', redis.call('ZRANK', account.queue_key, known.request_id) }
end

-- The accounts of the request's instance and of its former attempt's: one table where that is one instance.
local function read_accounts(former)
  local account = read_account(8, request.instance_id)
  if former and former.instance_id ~= request.instance_id then
    return account, read_account(13, former.instance_id)
  end
  return account, account
end

-- Whether the load moved away from what the decision saw; the request's own former attempt does not count.
local function is_stale(account, former)
  if not seen_tokens then
    return false
  end
  local pending = account.pending_tokens
  if former and former.instance_id == request.instance_id and former.state ~= 'prefilled' then
    pending = pending - former.uncached_tokens
  end
  return pending > seen_tokens + tolerance_tokens
end

-- Takes the place of the former attempt, and releases it.
local function succeed(former, former_account, account)
  request.sequence = former.sequence
  request.ttft_features = nil
  leave(former_account, former)
  forget_chain(former.request_id)
  if former_account.id ~= account.id then
    grant_next(requests_key, former_account, now_ms)
    write_account(former_account)
  end
end

local former = read_request(requests_key, request.request_id)
if former and former.replica_id ~= request.replica_id then
  return { 'duplicate', 0 } -- another client chose the same id
end
if former and former.instance_id ~= ARGV[8] then
  return { 'moved', former.instance_id }
end
local account, former_account = read_accounts(former)
if former and not former_account then
  forget_request(requests_key, former.request_id) -- its instance was deleted by hand
  former = nil
end
if former and former.attempt >= request.attempt then
  return standing(former_account, former)
end
if not account or not takes_requests(account) then
  return { 'not_ready', 0 }
end
if is_stale(account, former) then
  return { 'stale', 0 }
end

local placed_tokens = request.uncached_tokens
request.enqueued_ms = former and former.enqueued_ms or now_ms
local goes_now = may_go_unlisted(account, request, chain, now_ms)
-- A retry is let in even if the queue is full: its request was admitted before.
if not former and not goes_now and is_full(account, placed_tokens, now_ms + request.slo_ms, now_ms) then
  return { 'queue_full', 0 }
end

if former then
  succeed(former, former_account, account)
else
  arrive(books, request, now_ms)
end
take_place(books, account, request, placed_tokens, goes_now, now_ms)
if ARGV[7] == '1' then
  redis.call('ZADD', KEYS[5], 'NX', now_ms, request.instance_id)
end
if not goes_now then
  keep_chain(request.request_id, chain)
  grant_next(requests_key, account, now_ms, request.request_id)
end
write_account(account)
if goes_now then
  return { 'dispatched', 0 }
end
return standing(account, read_request(requests_key, request.request_id))
