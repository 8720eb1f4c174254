-- Twin of scheduling/queue_order.py: who can still be on time, and whom to grant next of those (Moore-Hodgson).
local PLANNED_REQUESTS = 256
local CALM_WINDOWS = 4

-- What is left, on average, of the engine step that a request finds under way.
local function step_rest_tokens(dispatch_window_tokens, other_tokens)
  return math.min(math.floor(dispatch_window_tokens / 4), other_tokens)
end

local function steps_behind(deadline_ms, uncached_tokens, now_ms, step_tokens, rate)
  return now_ms + (step_tokens + uncached_tokens) * 1000 / rate > deadline_ms
end

local function is_calm(earliest_deadline_ms, now_ms, on_time_tokens, rate)
  return now_ms + on_time_tokens * 1000 / rate <= earliest_deadline_ms
end

local function is_overdue(enqueued_ms, now_ms)
  return now_ms - enqueued_ms >= max_hold_ms
end

local function is_surplus(late_tokens, rate, overdue_work_ms)
  return late_tokens * 1000 / rate + overdue_work_ms >= max_late_work_ms
end

-- Whether late work would take nothing from who is on time.
local function has_room_to_spare(dispatched_tokens, kv_demand)
  return dispatched_tokens == 0 and kv_demand < 1
end

-- A heap of positions: the longest request on top, of equal ones the latest.
local function goes_above(waiting, one, other)
  local tokens, others = waiting[one].uncached_tokens, waiting[other].uncached_tokens
  return tokens > others or (tokens == others and one > other)
end

local function push(heap, waiting, position)
  local child = #heap + 1
  heap[child] = position
  while child > 1 do
    local parent = math.floor(child / 2)
    if not goes_above(waiting, heap[child], heap[parent]) then
      return
    end
    heap[child], heap[parent] = heap[parent], heap[child]
    child = parent
  end
end

local function pop(heap, waiting)
  local top, last = heap[1], table.remove(heap)
  local parent, size = 1, #heap
  if size > 0 then
    heap[1] = last
  end
  while true do
    local child = 2 * parent
    if child > size then
      return top
    end
    if child < size and goes_above(waiting, heap[child + 1], heap[child]) then
      child = child + 1
    end
    if not goes_above(waiting, heap[child], heap[parent]) then
      return top
    end
    heap[child], heap[parent] = heap[parent], heap[child]
    parent = child
  end
end

-- The plan for a list of {deadline_ms, uncached_tokens}, earliest deadline first: position of the request to grant next,
-- and the tokens of those set aside.
local function plan_on_time(waiting, now_ms, ahead_tokens, rate)
  if #waiting == 0 then
    return 1, 0
  end
  local planned = math.min(#waiting, PLANNED_REQUESTS)
  local end_ms = now_ms + ahead_tokens * 1000 / rate
  local kept, aside, aside_tokens = {}, {}, 0
  for position = 1, planned do
    push(kept, waiting, position)
    end_ms = end_ms + waiting[position].uncached_tokens * 1000 / rate
    if end_ms > waiting[position].deadline_ms then
      local longest = pop(kept, waiting)
      end_ms = end_ms - waiting[longest].uncached_tokens * 1000 / rate
      aside[longest] = true
      aside_tokens = aside_tokens + waiting[longest].uncached_tokens
    end
  end
  local shortest = 1
  for position = 1, planned do
    if kept[1] and not aside[position] then
      return position, aside_tokens
    end
    if waiting[position].uncached_tokens < waiting[shortest].uncached_tokens then
      shortest = position
    end
  end
  return shortest, aside_tokens
end
