-- include: grants
-- include: holders
-- include: kv
-- include: window
-- include: replicas
-- How a request takes its place on an instance. A request here is a record; books are the keys and bounds that it needs:
-- meta_key, requests_key, replicas_key, arrivals_key, new_holders_key, old_holders_key, chain and marks (packed; no marks
-- to remember no holders), arrivals and head_bytes of the arrival log, max_marks of a generation of holders.

-- With nobody else to choose from the request need not be listed first: whether it may go now, counted by what the
-- instance has been given. Else it keeps the count it was placed with, and is counted anew when the queue is.
local function may_go_unlisted(account, request, chain, now_ms)
  if held_requests(account) > 0 or not has_room(account) or is_late(account, request, now_ms) then
    return false
  end
  local placed_tokens = request.uncached_tokens
  request.uncached_tokens = uncached_tokens_now(account, chain, request)
  if is_late(account, request, now_ms) then
    request.uncached_tokens = placed_tokens
    return false
  end
  return true
end

-- A new request is numbered and enters the arrival log.
local function arrive(books, request, now_ms)
  request.sequence = redis.call('HINCRBY', books.meta_key, 'request_sequence', 1)
  redis.call('XADD', books.arrivals_key, 'MAXLEN', '~', books.arrivals, '*',
    'at', now_ms, 'head', string.sub(books.chain, 1, books.head_bytes))
end

-- Believes that the instance will hold the chain: as given, or what it does not hold yet as promised.
local function stamp_prefix(books, account, request, is_given)
  local chain = books.chain
  local blocks = #chain / 8
  local given = is_given and blocks or given_blocks(account.kv_key, chain, blocks)
  stamp_chain(account, chain, request.block_tokens, given)
  stamp_holders(books.new_holders_key, books.old_holders_key, books.marks, books.max_marks, request.instance_id)
  request.kv_instance_id = request.instance_id
end

-- Counts the request on its instance, as dispatched if it goes now; the account is left to be written.
local function take_place(books, account, request, placed_tokens, goes_now, now_ms)
  if goes_now then
    request.state = 'dispatched'
    request.dispatched_ms = now_ms
  end
  enter_anew(account, request, now_ms)
  add_to_window(account, now_ms, placed_tokens)
  stamp_prefix(books, account, request, goes_now)
  write_request(books.requests_key, request)
  meet_replica(books.replicas_key, request.replica_id, now_ms)
end
