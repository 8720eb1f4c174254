-- One instance: what is described of it and its counts, one text in a hash of all (statestore/records.py). Read once,
-- changed as a table, written once. Every change grows its version, by which plans are committed.
local decoded = require('shared.decoded')
local records = require('records')
local rules = require('rules')
local complete_instance = records.complete_instance
local described_text, rest_text = records.described_text, records.rest_text
local overtaken_tokens, rank_s, is_calm_with = rules.overtaken_tokens, rules.rank_s, rules.is_calm
local ipairs, tonumber, unpack = ipairs, tonumber, unpack
local call = redis.call

-- Instances that this call has read.
local instances

-- Before each call.
local function begin()
  instances = {}
end

-- Instances that earlier calls have read or written, by the prefix of their pool's keys: most texts have not changed
-- since.
local read_before = {}

-- The instance of a text; nil where there is no such instance that can be read: the leader mends it
-- (statestore/pool/upkeep.py).
local function instance_from(id, text)
  local read = read_before[KEYS[1]]
  if not read or read.number > terms.kept_instances then
    read = { number = 0, by_id = {} }
    read_before[KEYS[1]] = read
  end
  local instance = read.by_id[id]
  if not instance or instance.text ~= text then
    local former = instance
    instance = decoded(text)
    if instance then
      complete_instance(instance)
      instance.id, instance.text = id, text
      read.number = read.number + (former and 0 or 1)
    end
    read.by_id[id] = instance
  end
  instances[id] = instance
  return instance
end

local function read(id)
  return instances[id] or instance_from(id, call('HGET', keys.instance_records, id))
end

-- Reads several instances at once; those that this call has read stay as they are.
local function read_several(ids)
  local texts = call('HMGET', keys.instance_records, unpack(ids))
  for place, id in ipairs(ids) do
    if not instances[id] then
      instance_from(id, texts[place])
    end
  end
end

-- The role that cannot serve a leg (scheduling/state/legs.py).
local OTHER_ROLE = { prefill = 'decode', decode = 'prefill' }

local function takes_requests(instance, leg)
  return instance.state == 'ready' and instance.role ~= OTHER_ROLE[leg or 'whole']
end

local function has_room(instance, windows)
  return (instance.state == 'ready' or instance.state == 'draining')
    and instance.dispatched_tokens < (windows or 1) * instance.dispatch_window_tokens
    and instance.running_requests < instance.max_running_requests
end

-- Whether one more may be dispatched as no deadline is at stake: all work, so many more tokens included, is done by
-- then. Nothing may be deferred meanwhile, unless classes fill idle room (terms.fills): then some always is.
local function is_calm(instance, tokens, deadline_ms, now_ms)
  local on_time_tokens = instance.pending_tokens - instance.deferred_tokens
  return (instance.deferred_tokens == 0 or terms.fills == 1) and has_room(instance, terms.calm_windows)
    and is_calm_with(on_time_tokens + tokens, instance.tokens_per_s, now_ms, deadline_ms)
end

-- The part of its text that transitions do not change is made once; a script that changes it clears 'described'.
local function write_record(instance)
  instance.described = instance.described or described_text(instance)
  instance.text = instance.described .. rest_text(instance)
  call('HSET', keys.instance_records, instance.id, instance.text)
end

-- Also its rank among the least loaded of its role.
local function write(instance)
  instance.version = instance.version + 1
  write_record(instance)
  if takes_requests(instance) then
    local rank = rank_s(instance, overtaken_tokens(instance, 0), terms.kv_weight_s)
    call('ZADD', keys.least_loaded .. instance.role, rank, instance.id)
  else
    call('ZREM', keys.least_loaded .. instance.role, instance.id)
  end
end

-- {'REQUEST_ID UNCACHED_TOKENS', rank, …}: a queue in order up to what one plan looks at, then the first deferred
-- requests of a longer one.
local function head_entries(instance_id)
  local key = keys.queue .. instance_id
  local entries = call('ZRANGE', key, 0, terms.plan_limit - 1, 'WITHSCORES')
  if #entries == 2 * terms.plan_limit and tonumber(entries[#entries]) < terms.deferred_ms then
    local late = call('ZRANGEBYSCORE', key, terms.deferred_ms, '+inf', 'WITHSCORES', 'LIMIT', 0, terms.late_limit)
    for _, each in ipairs(late) do
      table.insert(entries, each)
    end
  end
  return entries
end

-- A queue head for a planner: instance id, now ms, the record, its entries.
local function queue_head(instance, now_ms)
  return { instance.id, now_ms, instance.text, head_entries(instance.id) }
end

-- The same where requests wait and one may be dispatched; else false.
local function room(instance, now_ms)
  local found = instance.queued_requests > 0 and has_room(instance)
  if instance.queued_requests > 0 and not found then
    local first = call('ZRANGE', keys.queue .. instance.id, 0, 0, 'WITHSCORES')
    found = first[2] and is_calm(instance, 0, first[2] % terms.band_ms, now_ms)
  end
  return found and queue_head(instance, now_ms) or false
end

return {
  begin = begin,
  read = read,
  read_several = read_several,
  takes_requests = takes_requests,
  has_room = has_room,
  is_calm = is_calm,
  write_record = write_record,
  write = write,
  head_entries = head_entries,
  queue_head = queue_head,
  room = room,
}
