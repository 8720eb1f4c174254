-- The adapters of an instance in the order of their last use, as its engine keeps them
-- (scheduling/estimates/adapters.py): those of requests that run are used by every step, so they come first. The score
-- is the time of the last use, and from terms.running_score on the number of requests that run.
local rules = require('rules')
local pairs, tonumber, max = pairs, tonumber, math.max
local call, concat, format = redis.call, table.concat, string.format

-- The place behind all adapters of an instance.
local function end_place(instance)
  return max(instance.adapter_slots, instance.adapter_host_slots)
end

-- Times of the load of an adapter that the instance does not have, in seconds: from host memory, and into it. Its
-- share is what its rank makes of described times.
local function new_loads_s(instance, share)
  if instance.adapter_slots == 0 then
    return 0, 0
  end
  local place = end_place(instance)
  return rules.adapter_host_s(instance, place, share), rules.adapter_disk_s(instance, place, share)
end

-- What a request waits for until its adapter is on the device of an instance (scheduling/state/adapter_wait.py).
local function waits_on(instance, adapter, share)
  if instance.adapter_slots == 0 then
    return 0, 0, 0
  end
  local key = keys.adapters .. instance.id
  local place = call('ZREVRANK', key, adapter)
  if place and place < instance.adapter_slots then
    return 0, 0, 0
  end
  place = place or end_place(instance)
  local running = call('ZCOUNT', key, terms.running_score, '+inf')
  return rules.adapter_host_s(instance, place, share), rules.adapter_disk_s(instance, place, share),
    rules.slot_turns(instance, running, instance.running_requests)
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

-- The waits of a request for its adapter, by the ids of their offers, as a placement replies them.
local function text_of(offers)
  local texts = {}
  for id, offer in pairs(offers) do
    texts[#texts + 1] = format('"%s":[%.17g,%.17g,%.17g]', id, offer.host_s, offer.disk_s, offer.slot_turns)
  end
  return '{' .. concat(texts, ',') .. '}'
end

return { text_of = text_of, new_loads_s = new_loads_s, waits_on = waits_on, begin_use = begin_use, end_use = end_use }
