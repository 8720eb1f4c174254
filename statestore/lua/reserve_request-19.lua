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
-- include: grants
-- include: holders
-- include: kv
-- include: window
-- include: replicas
local now_ms = store_now_ms()
local request = cjson.decode(ARGV[3])
local requests_key = KEYS[2]

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

local former = read_request(requests_key, request.request_id)
if former and former.replica_id ~= request.replica_id then
  return { 'duplicate', 0 } -- another client chose the same id
end
if former and former.instance_id ~= ARGV[8] then
  return { 'moved', former.instance_id }
end
local account = read_account(8, request.instance_id)
local former_account = account
if former and former.instance_id ~= request.instance_id then
  former_account = read_account(13, former.instance_id)
end
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
if ARGV[5] ~= '' then
  local pending = account.pending_tokens
  if former and former.instance_id == request.instance_id and former.state ~= 'prefilled' then
    pending = pending - former.uncached_tokens
  end
  if pending > tonumber(ARGV[5]) + tonumber(ARGV[6]) then
    return { 'stale', 0 }
  end
end
request.enqueued_ms = former and former.enqueued_ms or now_ms
-- With nobody else to choose from the request need not be listed first.
local chain, placed_tokens = ARGV[4], request.uncached_tokens
local room = held_requests(account) == 0 and has_room(account) and not is_late(account, request, now_ms)
if room then
  request.uncached_tokens = uncached_tokens_now(account, chain, request)
  room = not is_late(account, request, now_ms)
end
if not room then
  request.uncached_tokens = placed_tokens -- it is counted anew when the queue is
end
-- A retry is let in even if the queue is full: its request was admitted before.
if not former and not room and is_full(account, request.uncached_tokens, now_ms + request.slo_ms, now_ms) then
  return { 'queue_full', 0 }
end
if former then
  request.sequence = former.sequence
  request.ttft_features = nil
  leave(former_account, former)
  forget_chain(former.request_id)
  if former_account.id ~= account.id then
    grant_next(requests_key, former_account, now_ms)
    write_account(former_account)
  end
else
  request.sequence = redis.call('HINCRBY', KEYS[1], 'request_sequence', 1)
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[9], '*',
    'at', now_ms, 'head', string.sub(chain, 1, tonumber(ARGV[10])))
end
request.kv_instance_id = request.instance_id
if room then
  request.state = 'dispatched'
  request.dispatched_ms = now_ms
end
enter_anew(account, request, now_ms)
write_request(requests_key, request)
add_to_window(account, now_ms, placed_tokens)
local blocks = #chain / 8
stamp_chain(account, chain, request.block_tokens, room and blocks or given_blocks(account.kv_key, chain, blocks))
stamp_holders(KEYS[6], KEYS[7], ARGV[11], tonumber(ARGV[12]), request.instance_id)
meet_replica(KEYS[3], request.replica_id, now_ms)
if ARGV[7] == '1' then
  redis.call('ZADD', KEYS[5], 'NX', now_ms, request.instance_id)
end
if not room then
  keep_chain(request.request_id, chain)
  grant_next(requests_key, account, now_ms, request.request_id)
end
write_account(account)
if room then
  return { 'dispatched', 0 }
end
return standing(account, read_request(requests_key, request.request_id))
