-- How a live request counts on its instance in each of its states; docs/reference/redis-keys.md lists its fields. What
-- its replica told of it never changes; where it was placed does. Both are texts (statestore/records.py).
local adapters = require('shared.adapters')
local decoded = require('shared.decoded')
local records = require('records')
local rules = require('rules')
local complete_placed, placed_text = records.complete_placed, records.placed_text
local count = rules.count
local type, unpack = type, unpack
local call = redis.call

-- Where it was placed, and with 'told' what its replica told of it; nil where there is no such request, and then
-- whether there is one that cannot be read.
local function read(id, ...)
  local placed, told = unpack(call('HMGET', keys.request .. id, 'placed', ...))
  local request = decoded(placed)
  local known = decoded(told) or {}
  if not request or type(request.instance_id) ~= 'string' or (... and type(known.replica_id) ~= 'string') then
    return nil, placed or told
  end
  complete_placed(request)
  request.id, request.told = id, known
  return request
end

local function write_placed(request)
  call('HSET', keys.request .. request.id, 'placed', placed_text(request))
end

-- Enters a request that counts on no instance, in a state.
local function enter_nowhere(id, state, told, now_ms)
  local request = {
    instance_id = '', leg = 'whole', state = state, uncached_tokens = 0, enqueued_ms = now_ms,
    dispatched_ms = state == 'held' and 0 or now_ms, prefilled_ms = 0, alternative_id = '',
    alternative_uncached_tokens = 0, deferred = 0, band = 0, load_ms = 0,
  }
  call('HSET', keys.request .. id, 'placed', placed_text(request), 'told', told)
  call('ZADD', keys.passed_on, now_ms, id)
end

-- How a held request is listed: what a plan has to know of it, in one text.
local function listed_as(request)
  return request.id .. ' ' .. request.uncached_tokens
end

-- Counts and lists a request on an instance.
local function enter(instance, request, rank, now_ms)
  local had_work, ran = instance.pending_tokens > instance.deferred_tokens, instance.running_requests > 0
  count(request, instance, 1)
  if not ran and instance.running_requests > 0 then
    instance.running_since_ms = now_ms
  end
  if not had_work and instance.pending_tokens > instance.deferred_tokens then
    instance.work_since_ms = now_ms
  end
  if request.state == 'held' then
    call('ZADD', keys.queue .. instance.id, rank, listed_as(request))
  else
    call('ZADD', keys.running .. instance.id, request.dispatched_ms, request.id)
    if request.told.adapter and instance.adapter_slots > 0 then
      adapters.begin_use(instance, request.told.adapter)
    end
  end
end

-- The reverse.
local function leave(instance, request, now_ms)
  count(request, instance, -1)
  if request.state == 'held' then
    call('ZREM', keys.queue .. instance.id, listed_as(request))
  else
    call('ZREM', keys.running .. instance.id, request.id)
    if request.told.adapter and instance.adapter_slots > 0 then
      adapters.end_use(instance, request.told.adapter, now_ms)
    end
  end
end

return {
  read = read,
  write_placed = write_placed,
  enter = enter,
  enter_nowhere = enter_nowhere,
  leave = leave,
}
