-- The adapters of an instance in the order of their last use, as its engine keeps them
-- (scheduling/estimates/adapters.py): those of requests that run are used by every step, so they come first. The score
-- is the time of the last use, and from terms.running_score on the number of requests that run.
local rules = require('rules')
local pairs, tonumber, max = pairs, tonumber, math.max
local call, concat, format = redis.call, table.concat, string.format

-- Time until the adapter of a request is on the device of an instance, in seconds.
local function wait_s(instance, adapter)
  if instance.adapter_slots == 0 then
    return 0
  end
  local key = keys.adapters .. instance.id
  local place = call('ZREVRANK', key, adapter) or instance.adapter_host_slots
  local running = place < instance.adapter_slots and 0 or call('ZCOUNT', key, terms.running_score, '+inf')
  return rules.adapter_s(instance, place, running)
end

-- One more request of the adapter runs there.
local function begin_use(instance, adapter)
  local key = keys.adapters .. instance.id
  local score = call('ZSCORE', key, adapter)
  call('ZADD', key, max(terms.running_score, tonumber(score or 0)) + 1, adapter)
  if not score then
    call('ZREMRANGEBYRANK', key, 0, -1 - max(instance.adapter_host_slots, instance.adapter_slots))
  end
end

-- One of them has ended.
local function end_use(instance, adapter, now_ms)
  local key = keys.adapters .. instance.id
  local score = tonumber(call('ZSCORE', key, adapter) or 0)
  if score > terms.running_score + 1 then
    call('ZADD', key, score - 1, adapter)
  elseif score > terms.running_score then
    call('ZADD', key, now_ms, adapter)
  end
end

-- The times until the adapter is there, on each of some instances, as a placement replies them.
local function text_of(waits)
  local texts = {}
  for id, seconds in pairs(waits) do
    texts[#texts + 1] = format('"%s":%.17g', id, seconds)
  end
  return '{' .. concat(texts, ',') .. '}'
end

return { text_of = text_of, wait_s = wait_s, begin_use = begin_use, end_use = end_use }
