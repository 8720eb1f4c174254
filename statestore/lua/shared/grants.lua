-- include: account
-- include: terms
-- include: request
-- include: queue_order
-- include: overdue_work
-- Who is granted and when; twin of statestore/ledger/order.py.
local HELD_PER_CALL = 500

local function is_behind(account, deadline_ms, uncached_tokens, other_tokens, now_ms)
  local step_tokens = step_rest_tokens(account.dispatch_window_tokens, other_tokens)
  return steps_behind(deadline_ms, uncached_tokens, now_ms, step_tokens, tokens_per_s(account))
end

-- Whether one more request may be dispatched because no deadline is at stake.
local function has_calm_room(account, earliest_deadline_ms, now_ms, more_tokens)
  return account.late_requests == 0
    and has_room(account, CALM_WINDOWS)
    and is_calm(earliest_deadline_ms, now_ms, on_time_tokens(account) + more_tokens, tokens_per_s(account))
end

-- Whether one more request would be dispatched without a wait, so that no limit of the queue concerns it.
local function takes_at_once(account, uncached_tokens, deadline_ms, now_ms)
  if redis.call('ZCARD', account.queue_key) > 0 then
    return false
  end
  if not has_room(account) then
    return by_deadline and has_calm_room(account, deadline_ms, now_ms, uncached_tokens)
  end
  if not by_deadline or not is_behind(account, deadline_ms, uncached_tokens, on_time_tokens(account), now_ms) then
    return true
  end
  -- Where there is room to spare nobody is late either, see grant_by_deadline.
  return has_room_to_spare(account.dispatched_tokens, kv_demand(account))
end

local function is_full(account, uncached_tokens, deadline_ms, now_ms)
  return held_requests(account) >= account.max_queued_requests
    and not takes_at_once(account, uncached_tokens, deadline_ms, now_ms)
end

-- Dispatches one held request and tells its replica; the caller's own needs no message. Returns what dispatch does.
local function grant(requests_key, account, request, now_ms, caller_id)
  local chain = dispatch(account, request, now_ms)
  write_request(requests_key, request)
  if request.request_id ~= caller_id then
    redis.call('PUBLISH', grants_channel .. request.replica_id, cjson.encode({
      request_id = request.request_id, instance_id = request.instance_id, attempt = request.attempt,
      uncached_tokens = request.uncached_tokens,
    }))
  end
  return chain
end

local function grant_fifo(requests_key, account, now_ms, caller_id)
  local granted = 0
  while has_room(account) do
    local request_id = redis.call('ZRANGE', account.queue_key, 0, 0)[1]
    if not request_id then
      break
    end
    grant(requests_key, account, read_request(requests_key, request_id), now_ms, caller_id)
    granted = granted + 1
  end
  return granted
end

-- Whether a request that is to be held on the instance steps behind right away.
local function is_late(account, request, now_ms)
  local deadline_ms = request.enqueued_ms + request.slo_ms
  return by_deadline
    and (is_behind(account, deadline_ms, request.uncached_tokens, on_time_tokens(account), now_ms)
      or is_overdue(request.enqueued_ms, now_ms))
end

-- Counts a request on an instance, among the late ones if it is held and cannot be on time there.
local function enter_anew(account, request, now_ms)
  request.late = request.state == 'held' and is_late(account, request, now_ms)
  request.surplus = request.late
    and is_surplus(account.late_tokens, tokens_per_s(account), overdue_work_ms(account, now_ms))
  enter(account, request, now_ms)
end

-- The queue, earliest deadline first. The figures that an order takes are picked out of the records: a whole queue is
-- looked at, and decoding it would cost ten times as much.
local function read_queue(requests_key, account)
  local waiting = {}
  local queue = redis.call('ZRANGE', account.queue_key, 0, -1, 'WITHSCORES')
  for first = 1, #queue, 2 * HELD_PER_CALL do
    local ids = {}
    for index = first, math.min(first + 2 * HELD_PER_CALL, #queue) - 1, 2 do
      ids[#ids + 1] = queue[index]
    end
    for place, text in ipairs(redis.call('HMGET', requests_key, unpack(ids))) do
      waiting[#waiting + 1] = {
        request_id = ids[place],
        deadline_ms = tonumber(queue[first + 2 * place - 1]),
        uncached_tokens = tonumber(string.match(text, '"uncached_tokens":(%d+)')),
        prompt_tokens = tonumber(string.match(text, '"prompt_tokens":(%d+)')),
        block_tokens = tonumber(string.match(text, '"block_tokens":(%d+)')),
        enqueued_ms = tonumber(string.match(text, '"enqueued_ms":(%d+)')),
      }
    end
  end
  return waiting
end

-- Looks up the chains of those planned next, where that was not done yet; false for who has none.
local function look_up_chains(waiting)
  local places, ids = {}, {}
  for place = 1, math.min(#waiting, PLANNED_REQUESTS) do
    if waiting[place].chain == nil then
      places[#places + 1] = place
      ids[#ids + 1] = waiting[place].request_id
    end
  end
  if ids[1] then
    for index, chain in ipairs(read_chains(ids)) do
      waiting[places[index]].chain = chain
    end
  end
end

-- Counts the uncached tokens of those planned next by what the instance has been given until now; with a chain given,
-- only of those that share its first block.
local function recount(requests_key, account, waiting, given)
  look_up_chains(waiting)
  for place = 1, math.min(#waiting, PLANNED_REQUESTS) do
    local held = waiting[place]
    if held.chain and (not given or string.sub(held.chain, 1, 8) == string.sub(given, 1, 8)) then
      local uncached_tokens = uncached_tokens_now(account, held.chain, held)
      if uncached_tokens ~= held.uncached_tokens then
        local request = read_request(requests_key, held.request_id)
        count_anew(account, request, uncached_tokens)
        write_request(requests_key, request)
        held.uncached_tokens = uncached_tokens
      end
    end
  end
end

-- Those of the queue who can still be on time, earliest deadline first; the others step behind.
local function part_queue(requests_key, account, now_ms)
  local waiting, rate = {}, tokens_per_s(account)
  local queue = read_queue(requests_key, account)
  recount(requests_key, account, queue)
  local tokens = on_time_tokens(account)
  for _, held in ipairs(queue) do
    local other_tokens = tokens - held.uncached_tokens
    if is_behind(account, held.deadline_ms, held.uncached_tokens, other_tokens, now_ms)
      or is_overdue(held.enqueued_ms, now_ms)
    then
      local request = read_request(requests_key, held.request_id)
      delist(account, request)
      request.late, request.surplus = true, is_surplus(account.late_tokens, rate, overdue_work_ms(account, now_ms))
      list(account, request)
      write_request(requests_key, request)
    else
      waiting[#waiting + 1] = held
    end
  end
  return waiting
end

local function plan(account, waiting, now_ms)
  local step_tokens = step_rest_tokens(account.dispatch_window_tokens, on_time_tokens(account))
  return plan_on_time(waiting, now_ms, account.dispatched_tokens + step_tokens, tokens_per_s(account))
end

local function oldest_late(requests_key, account)
  if account.late_requests == 0 then
    return nil
  end
  local request_id = redis.call('ZRANGE', account.late_key, 0, 0)[1]
  return request_id and read_request(requests_key, request_id)
end

-- Dispatches who waits while no deadline is at stake.
local function grant_calmly(requests_key, account, now_ms, caller_id)
  local granted = 0
  while account.late_requests == 0 and has_room(account, CALM_WINDOWS) do
    local head = redis.call('ZRANGE', account.queue_key, 0, 0, 'WITHSCORES')
    if not head[1] or not has_calm_room(account, tonumber(head[2]), now_ms, 0) then
      break
    end
    local request = read_request(requests_key, head[1])
    count_by_given(account, request, read_chains({ head[1] })[1]) -- whoever was to bring its prefix may have left
    if not has_calm_room(account, tonumber(head[2]), now_ms, 0) then
      write_request(requests_key, request)
      break
    end
    grant(requests_key, account, request, now_ms, caller_id)
    granted = granted + 1
  end
  return granted
end

-- Looking at a whole queue costs in proportion to it, so that is done when there is room to give away and by the sweep.
local function grant_by_deadline(requests_key, account, now_ms, caller_id, sweep)
  local granted, waiting = 0, {}
  if sweep or has_room(account) then
    waiting = part_queue(requests_key, account, now_ms)
  end
  if not serves(account) then
    return granted
  end
  local late = oldest_late(requests_key, account)
  while late and is_overdue(late.enqueued_ms, now_ms) do
    grant(requests_key, account, late, now_ms, caller_id)
    add_overdue_work(account, late.uncached_tokens * 1000 / tokens_per_s(account), now_ms)
    granted = granted + 1
    late = oldest_late(requests_key, account)
  end
  if sweep or has_room(account) then
    local first
    first, account.aside_tokens = plan(account, waiting, now_ms)
    while waiting[1] and has_room(account) do
      local request_id = table.remove(waiting, first).request_id
      local chain = grant(requests_key, account, read_request(requests_key, request_id), now_ms, caller_id)
      granted = granted + 1
      if chain then
        recount(requests_key, account, waiting, chain) -- it may have brought their prefix
      end
      first, account.aside_tokens = plan(account, waiting, now_ms)
    end
  end
  granted = granted + grant_calmly(requests_key, account, now_ms, caller_id)
  while late and has_room(account) and has_room_to_spare(account.dispatched_tokens, kv_demand(account)) do
    grant(requests_key, account, late, now_ms, caller_id)
    granted = granted + 1
    late = oldest_late(requests_key, account)
  end
  return granted
end

-- Dispatches held requests as the order says, looking at every one of them in a sweep; returns how many.
local function grant_next(requests_key, account, now_ms, caller_id, sweep)
  if by_deadline then
    return grant_by_deadline(requests_key, account, now_ms, caller_id, sweep)
  end
  return grant_fifo(requests_key, account, now_ms, caller_id)
end

-- Takes a request out of the pool and grants who is next. Without an account its instance was deleted by hand.
local function release(requests_key, account, request, now_ms)
  forget_request(requests_key, request.request_id)
  if account then
    leave(account, request)
    grant_next(requests_key, account, now_ms)
    write_account(account)
  end
end
