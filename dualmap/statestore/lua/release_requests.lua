-- Releases what requests need no more: of some the first token came, others are over. An instance is read and written
-- once.
-- ARGV  1 clock, 2 the lease of the replica that is reaped, as it was read, or ''; then 10 for each: request id;
--       instance id where its first token came, or '' where it is over; replica id or '' for any, attempt or '' for
--       any; what to note of it, as JSON, or ''; 'seen' where that first token, or its whole answer, was seen, else it
--       is presumed, or none came; what it gives back of its draws, where it is over, packed (BudgetGroup.packed), or
--       '' for all of them; what it is metered by, where it is over for good, 'kept' where only its try is, whose draws
--       stand unless they are given back in full, or ''; its counts, packed, or ''; the turn of a run that is over with
--       it, as the tokens of its answer, its prefill and decode times in ms, 1 where an instance had it or 0, and its
--       key, or ''
-- Reply for each the queue of its instance (queue_head), nil where that has no room, is empty or comes with a later
--       one; 0 if nothing was done: it is unknown, elsewhere, of another replica or newer, past this, or the lease is
--       another one
local budgets = require('shared.budgets')
local instances = require('shared.instances')
local pulls = require('shared.pulls')
local records = require('records')
local requests = require('shared.requests')
local rules = require('rules')
local runs = require('shared.runs')
local shares = require('shared.shares')
local usage = require('shared.usage')
local write_books = require('shared.book_end')
local error, pairs, pcall, tonumber, unpack = error, pairs, pcall, tonumber, unpack
local call, format, gsub, match = redis.call, string.format, string.gsub, string.match

local FIRST_REQUEST = 3

-- Of the call; 'last' has the place of the last release of each instance in the replies.
local now_ms, lease, last, replies

local function log_sample(subject, text)
  call('XADD', keys.samples, 'MAXLEN', '~', terms.max_samples, '*', subject, text)
end

-- Releases pending tokens; where the first token was seen, stamps the prefill clock and logs a sample. The request,
-- where it waited there for this.
local function prefill(id, note, seen, instance_id)
  local request, instance = requests.read(id), instances.read(instance_id)
  if not request or not instance or request.instance_id ~= instance_id or request.state ~= 'dispatched' then
    return nil
  end
  local tokens = request.uncached_tokens
  if request.load_ms > 0 then
    pulls.list_pulled(request, instance, now_ms)
  end
  rules.count_prefill(request, instance, 1)
  request.state = 'prefilled'
  if seen then
    if note ~= '' then
      log_sample(instance_id, format('{"tokens":%d,"enqueued_ms":%d,"dispatched_ms":%d,"former_ms":%d,'
        .. '"prefilled_ms":%d,"unseen":%d,"note":%s}', tokens, request.enqueued_ms, request.dispatched_ms,
        instance.last_prefill_ms, now_ms, instance.unseen_prefills, note))
    end
    request.prefilled_ms, instance.last_prefill_ms, instance.unseen_prefills = now_ms, now_ms, 0
  else
    instance.unseen_prefills = instance.unseen_prefills + 1
  end
  requests.write_placed(request)
  return request
end

-- Keeps a record by which a request is metered, or reaped, that is nowhere. Unless its draws stand it has drawn
-- nothing.
local function keep(request, told, stands)
  local state, instance_id, key = request.state, request.instance_id, keys.request .. request.id
  request.state, request.instance_id = state == 'prefilled' and state or 'dispatched', ''
  told = stands and told or gsub(told, '"drawn":"[^"]*"', '"drawn":""')
  call('HSET', key, 'placed', records.placed_text(request), 'told', told)
  call('ZADD', keys.passed_on, now_ms, request.id)
  request.state, request.instance_id = state, instance_id
end

-- Releases all that is left. A whole answer shows at its end that its prefill is over, where nothing did before. The
-- request, where something was left.
local function finish(id, note, seen, _, replica_id, attempt, returned, used, counts)
  local request, is_damaged = requests.read(id, 'told')
  if is_damaged then
    call('DEL', keys.request .. id) -- what it counted is repaired
    call('ZREM', keys.passed_on, id)
  end
  if not request or (replica_id ~= '' and request.told.replica_id ~= replica_id)
    or (attempt ~= '' and request.told.attempt > tonumber(attempt))
    or (lease ~= '' and call('HGET', keys.replicas, replica_id) ~= lease) then
    return nil
  end
  local is_metered = (request.told.account or '') ~= ''
  local keeps = is_metered and used == terms.kept
  if keeps and request.instance_id == '' then
    return nil
  end
  local told, instance = keeps and call('HGET', keys.request .. id, 'told'), instances.read(request.instance_id)
  if instance and seen and request.state == 'dispatched' and request.load_ms > 0 then
    pulls.list_pulled(request, instance, now_ms)
  end
  if request.load_ms > 0 and request.state ~= 'prefilled' then
    pulls.give_back(id, now_ms)
  end
  call('DEL', keys.request .. id)
  local stands = keeps and returned ~= ''
  if keeps then
    keep(request, told, stands)
  elseif request.instance_id == '' then
    call('ZREM', keys.passed_on, id)
  end
  if note ~= '' then
    log_sample('noted', note)
  end
  if request.told.drawn and request.told.drawn ~= '' and not stands then
    budgets.give_back(returned, request.told.drawn, request.enqueued_ms)
  end
  if is_metered and not keeps and counts ~= '' then
    usage.meter(request, counts, used)
    if lease ~= '' then
      usage.remember_lost(request, used, now_ms)
    end
  end
  if instance then
    requests.leave(instance, request, now_ms)
    if request.dispatched_ms > 0 then
      local held = rules.context_tokens_of(request) / instance.kv_capacity_tokens
      shares.free_memory(request.told.shares_as, held, now_ms - request.dispatched_ms)
    end
  end
  if instance and seen and request.prefilled_ms == 0 then
    instance.last_prefill_ms, instance.unseen_prefills = now_ms, instance.unseen_prefills + 1
  end
  return request
end

local function end_turn(turn, replica_id, instance_id)
  if lease == '' or call('HGET', keys.replicas, replica_id) == lease then
    local output_tokens, prefill_ms, decode_ms, was_sent, key = match(turn, '^(%d+) (%d+) (%d+) ([01]) (.+)$')
    runs.finish(key, output_tokens + 0, prefill_ms + 0, decode_ms + 0, was_sent == '1', instance_id, now_ms)
  end
end

-- Makes the releases, in order.
local function release_all()
  for first = FIRST_REQUEST, #ARGV, 10 do
    local id, instance_id, replica_id, attempt, note, seen, returned, used, counts, turn =
      unpack(ARGV, first, first + 9)
    local release = instance_id == '' and finish or prefill
    local request = release(id, note, seen == 'seen', instance_id, replica_id, attempt, returned, used, counts)
    replies[#replies + 1] = not request and 0
    if turn ~= '' then
      end_turn(turn, replica_id, request and request.instance_id or '')
    end
    local instance = request and instances.read(request.instance_id)
    if instance then
      instance.version = instance.version + (last[instance.id] and 1 or 0) -- every release is a change
      last[instance.id] = #replies
    end
  end
end

local function release_requests(at_ms)
  now_ms, lease, last, replies = at_ms, ARGV[2], {}, {}
  local is_done, failure = pcall(release_all)
  write_books(now_ms) -- in any case: the releases before one that failed are made
  runs.write_runs()
  usage.write_usage(now_ms)
  for id, place in pairs(last) do
    instances.write(instances.read(id))
    replies[place] = instances.room(instances.read(id), now_ms)
  end
  if not is_done then
    error(failure, 0)
  end
  return replies
end

return release_requests
