-- The ledger of runs: which are active on the memory of the fleet, and which wait for a turn. The rules are those of
-- scheduling/runs/admission.py.
--
-- A run is a hash with the fields of RunRecord (scheduling/runs/turn.py), and for each branch 'branch:NAME', which is
-- its tokens, the tokens that it shares, when it was seen, and its turns in flight, and for each turn that waits
-- 'waits:KEY', which is since when. A turn is a text in one hash: its state ('goes', 'waits', or 'first', where nothing
-- names its run yet), run, branch, tokens of its prompt, tokens that it shares, and of its last full block the depth
-- (0 where its prompt continues what an instance has stored) and the hash, and the field that its context is found by.
local books = require('shared.books')
local prefix_index = require('shared.prefix_index')
local rules = require('rules')
local shares = require('shared.shares')
local ipairs, next, pairs, tonumber, unpack = ipairs, next, pairs, tonumber, unpack
local call, find, floor, format, gsub = redis.call, string.find, math.floor, string.format, string.gsub
local match, max, min, sort, sub = string.match, math.max, math.min, table.sort, string.sub

local TEXTS = { tenant = true, parent = true, home = true }
local NUMBERS = { 'active', 'tokens', 'busy', 'turns', 'output_tokens', 'service', 'charged_ms', 'quantum_from',
  'interrupted', 'begun_ms', 'seen_ms', 'level', 'latest_ms', 'parked_ms', 'prefill_ms', 'decode_ms', 'tool_ms' }
local FIGURES = { 'used_tokens', 'capacity_tokens', 'ended_runs', 'mean_service', 'waiting_turns', 'passed',
  'on_time_ms' }
local WAITS, GOES, REFUSED = 0, 1, 2 -- what becomes of a turn that arrives
local MOST_AT_ONCE = 64 -- runs that one call lets go, or has give way
local MOST_LOOKED_AT = 4 -- runs that a turn looks at, where there are too many

-- Of the call: the figures of all runs, the runs that were read, by name, the turns that go now, by key, and those that
-- were entered, whose replicas see from the reply whether they go.
local ledger, known, gone, entered

local function begin()
  ledger, known, gone, entered = nil, {}, {}, {}
end

local function figures()
  if not ledger then
    ledger = {}
    for place, text in ipairs(call('HMGET', keys.runs, unpack(FIGURES))) do
      ledger[FIGURES[place]] = tonumber(text or 0) or 0
    end
  end
  return ledger
end

local function new_run(name)
  -- kept: what the store has of it, by field
  local run = { name = name, tenant = '', parent = '', home = '', branches = {}, waiting = {}, kept = {} }
  for _, field in ipairs(NUMBERS) do
    run[field] = 0
  end
  known[name] = run
  return run
end

-- A run by its name; nil where none is known.
local function read(name)
  if known[name] == nil then
    local flat = call('HGETALL', keys.run .. name)
    known[name] = false
    local run = flat[1] and new_run(name)
    for place = 1, #flat, 2 do
      local field, text = flat[place], flat[place + 1]
      local kind, named
      if find(field, ':', 1, true) then
        kind, named = match(field, '^(%a+):(.+)$')
      end
      if kind == 'branch' then
        local tokens, shared, seen_ms, busy = match(text, '^(%d+) (%d+) (%d+) (%d+)$')
        run.branches[named] = { tokens = tonumber(tokens or 0), shared = tonumber(shared or 0),
          seen_ms = tonumber(seen_ms or 0), busy = tonumber(busy or 0) }
        run.kept[field] = text
      elseif kind == 'waits' then
        run.waiting[named] = tonumber(text) or 0
      elseif TEXTS[field] then
        run[field], run.kept[field] = text, text
      elseif run[field] then
        run[field] = tonumber(text) or 0
        run.kept[field] = run[field]
      end
    end
  end
  return known[name] or nil
end

local function write(run)
  local flat, kept = {}, run.kept
  for field in pairs(TEXTS) do
    if kept[field] ~= run[field] then
      flat[#flat + 1], flat[#flat + 2] = field, run[field]
    end
  end
  for _, field in ipairs(NUMBERS) do
    if kept[field] ~= run[field] then
      flat[#flat + 1], flat[#flat + 2] = field, format('%.17g', run[field])
    end
  end
  for name, branch in pairs(run.branches) do
    local field = 'branch:' .. name
    local text = format('%d %d %d %d', branch.tokens, branch.shared, branch.seen_ms, branch.busy)
    if kept[field] ~= text then
      flat[#flat + 1], flat[#flat + 2] = field, text
    end
  end
  if flat[1] then
    call('HSET', keys.run .. run.name, unpack(flat))
  end
  if run.active == 1 and run.busy == 0 then
    call('ZADD', keys.runs_silent, run.seen_ms, run.name)
  else
    call('ZREM', keys.runs_silent, run.name)
  end
end

-- Writes what the call changed, and tells replicas of their turns that go now.
local function write_runs()
  for _, run in pairs(known) do
    if run then
      write(run)
    end
  end
  if ledger then
    local flat = {}
    for _, name in ipairs(FIGURES) do
      flat[#flat + 1], flat[#flat + 2] = name, format('%.17g', ledger[name])
    end
    call('HSET', keys.runs, unpack(flat))
  end
  for key in pairs(gone) do
    if not entered[key] then
      local replica_id, turn_id = match(key, '^(%S+) (.+)$')
      call('PUBLISH', keys.turns .. replica_id, turn_id)
    end
  end
end

local function set_tokens(run, branch, tokens)
  local grown = tokens - branch.tokens
  branch.tokens, run.tokens = tokens, run.tokens + grown
  if run.active == 1 then
    ledger.used_tokens = ledger.used_tokens + grown
  end
end

-- A sign of life of a run: it is charged for its memory until now.
local function see(run, now_ms)
  if run.active == 1 then
    run.service = run.service + run.tokens * (now_ms - run.charged_ms) / 1000
  end
  run.charged_ms, run.seen_ms = now_ms, now_ms
  call('ZADD', keys.runs_seen, now_ms, run.name)
end

local function activate(run, now_ms)
  run.active, run.charged_ms, run.seen_ms = 1, now_ms, now_ms
  if run.interrupted == 0 then
    run.quantum_from = run.service
  end
  run.interrupted = 0
  ledger.used_tokens = ledger.used_tokens + run.tokens
end

local function deactivate(run)
  if run.active == 1 then
    run.active, ledger.used_tokens = 0, ledger.used_tokens - run.tokens
    call('ZREM', keys.runs_silent, run.name)
  end
end

-- Lists a run that waits, by the times and the level that its order depends on.
local function list(run, now_ms)
  local since_ms = now_ms
  for _, each_ms in pairs(run.waiting) do
    since_ms = min(since_ms, each_ms)
  end
  call('ZADD', keys.runs_waiting, rules.waiting_since(since_ms, run.level), run.name)
  local late = run.latest_ms < now_ms
  call('ZREM', late and keys.runs_on_time or keys.runs_late, run.name)
  if late then
    call('ZREM', keys.runs_latest, run.name)
  else
    call('ZADD', keys.runs_latest, run.latest_ms, run.name)
  end
  call('ZADD', late and keys.runs_late or keys.runs_on_time,
    rules.waiting_rank(run.service, run.interrupted, run.level), run.name)
end

local function unlist(run)
  for _, key in ipairs({ keys.runs_waiting, keys.runs_on_time, keys.runs_latest, keys.runs_late }) do
    call('ZREM', key, run.name)
  end
  run.latest_ms = 0
end

-- The run that goes next, of those that wait, and the group that it is of; nil where none waits.
local function first_waiting(now_ms)
  local oldest = call('ZRANGE', keys.runs_waiting, 0, 0, 'WITHSCORES')
  if not oldest[1] then
    return nil
  end
  local late = call('ZRANGEBYSCORE', keys.runs_latest, '-inf', '(' .. now_ms, 'LIMIT', 0, MOST_AT_ONCE)
  for _, name in ipairs(late) do
    call('ZADD', keys.runs_late, call('ZSCORE', keys.runs_on_time, name) or 0, name)
    call('ZREM', keys.runs_on_time, name)
    call('ZREM', keys.runs_latest, name)
  end
  local on_time = call('ZRANGE', keys.runs_on_time, 0, 0)[1]
  local group = rules.goes_as(oldest[2] % terms.level_rank, now_ms, on_time and 1 or 0, figures().passed)
  if group == terms.aged then
    return oldest[1], group
  elseif group == terms.on_time then
    return on_time, group
  end
  return call('ZRANGE', keys.runs_late, 0, 0)[1], group
end

-- The tokens that active runs must leave for one of this group to go; none or less where it may go.
local function missing_tokens(run, group, now_ms)
  local room = rules.room_tokens(group, ledger.capacity_tokens, ledger.on_time_ms, now_ms)
  return rules.missing_tokens(run.tokens, ledger.used_tokens, room)
end

-- Has silent runs give way, as far as that makes room for a run; false where it does not. Where there are more of them
-- than one call looks at, these give way in any case, and a later call goes on.
local function makes_room(run, group, now_ms)
  local missing = missing_tokens(run, group, now_ms)
  if missing <= 0 then
    return true
  end
  local before_ms, left, silent = rules.silent_since_ms(now_ms), ledger.used_tokens, {}
  local names = call('ZRANGEBYSCORE', keys.runs_silent, '-inf', '(' .. before_ms, 'LIMIT', 0, MOST_AT_ONCE)
  for _, name in ipairs(names) do
    local other = missing > 0 and read(name)
    if other and other.active == 1 and other.busy == 0 and other.seen_ms < before_ms then
      silent[#silent + 1] = other
      missing, left = missing - other.tokens, left - other.tokens
    end
  end
  local has_room = missing <= 0 or left <= 0
  if not has_room and #names < MOST_AT_ONCE then
    return false
  end
  for _, other in ipairs(silent) do
    ledger.ended_runs = ledger.ended_runs + 1
    ledger.mean_service = rules.mean_service_with(other.service, ledger.ended_runs, ledger.mean_service)
    other.interrupted = 1
    deactivate(other)
  end
  return has_room
end

local function send(run, key, text)
  local name = match(text, '^%S+ %S+ (%S+)')
  local branch = run.branches[name]
  if branch then
    branch.busy = branch.busy + 1
  end
  run.busy, run.turns = run.busy + 1, run.turns + 1
  call('HSET', keys.run_turns, key, (gsub(text, '^%S+', 'goes')))
  gone[key] = true
end

-- Lets those go that wait and may go now.
local function let_go(now_ms)
  for _ = 1, MOST_AT_ONCE do
    local name, group
    if figures().waiting_turns > 0 then
      name, group = first_waiting(now_ms)
    end
    local run = name and read(name)
    if name and not run then -- it was taken away by hand
      unlist({ name = name })
    elseif not run or not makes_room(run, group, now_ms) then
      return
    else
      ledger.passed = group == terms.aged and 0 or ledger.passed + 1
      ledger.on_time_ms = group == terms.on_time and now_ms or ledger.on_time_ms
      activate(run, now_ms)
      unlist(run)
      local turns = {}
      for key in pairs(run.waiting) do
        turns[#turns + 1] = key
      end
      sort(turns, function(one, other)
        return run.waiting[one] < run.waiting[other] or (run.waiting[one] == run.waiting[other] and one < other)
      end)
      for _, key in ipairs(turns) do
        run.parked_ms = run.parked_ms + now_ms - run.waiting[key]
        run.waiting[key] = nil
        call('HDEL', keys.run .. run.name, 'waits:' .. key)
        ledger.waiting_turns = ledger.waiting_turns - 1
        local text = call('HGET', keys.run_turns, key)
        if text then
          send(run, key, text)
        end
      end
    end
  end
end

-- Whether an active run, of which a turn has come, leaves its memory to one that waits.
local function gives_way(run, now_ms)
  if ledger.waiting_turns <= 0 or run.busy > 0 then
    return false
  end
  local name, group = first_waiting(now_ms)
  local first = name and read(name)
  local had_quantum = rules.has_had_quantum(run.service, run.quantum_from, ledger.ended_runs, ledger.mean_service)
  return first and missing_tokens(first, group, now_ms) > 0
    and rules.gives_way(run.service, first.service, had_quantum and 1 or 0, ledger.used_tokens, ledger.capacity_tokens)
end

-- Forgets a run, and whatever is left of it.
local function forget(run)
  deactivate(run)
  for key in pairs(run.waiting) do
    call('HDEL', keys.run_turns, key)
    ledger.waiting_turns = ledger.waiting_turns - 1
  end
  unlist(run)
  call('ZREM', keys.runs_seen, run.name)
  call('DEL', keys.run .. run.name)
  known[run.name] = false
end

-- Forgets the run that was silent for longest, where there are too many, or it was for too long. One of too many that
-- has a turn in flight, or waiting, is seen: those behind it are looked at.
local function forget_oldest(now_ms)
  for _ = 1, MOST_LOOKED_AT do
    local oldest = call('ZRANGE', keys.runs_seen, 0, 0, 'WITHSCORES')
    local is_over = oldest[1] and tonumber(oldest[2]) < now_ms - terms.forget_run_ms
    if not is_over and call('ZCARD', keys.runs_seen) <= terms.max_runs then
      return
    end
    local run = read(oldest[1])
    if not run then
      call('ZREM', keys.runs_seen, oldest[1])
    elseif is_over or (run.busy == 0 and not next(run.waiting)) then
      forget(run)
    else
      call('ZADD', keys.runs_seen, now_ms, oldest[1])
    end
  end
end

local function hex(bytes)
  return (gsub(bytes, '.', function(byte)
    return format('%02x', string.byte(byte))
  end))
end

local function hash_at(chain, depth)
  return sub(chain, depth * 8 - 7, depth * 8)
end

-- The sampled prefixes of a chain, shallowest first, which later prompts that continue it have as well: one every
-- stride blocks, and the first block.
local function samples_of(chain, stride)
  local blocks, samples, depths = #chain / 8, { hash_at(chain, 1) }, { 1 }
  for depth = max(2, stride * max(1, floor(blocks / stride) - terms.run_samples)), blocks, stride do
    samples[#samples + 1], depths[#depths + 1] = hash_at(chain, depth), depth
  end
  return samples, depths
end

-- The fields under which a tenant's contexts are found, by samples: no prompt continues the context of another tenant.
local function fields_of(samples, scope)
  if scope == '' then
    return samples
  end
  local fields = {}
  for place, sample in ipairs(samples) do
    fields[place] = sample .. scope
  end
  return fields
end

-- The field that stands where prompts of several runs end in a block: their contexts do not show whose a prompt is that
-- begins with it, such as with a system prompt that all have and that a short question follows.
local function common_field(hash, field)
  return 'common ' .. hash .. sub(field, 9) -- behind the sample stands the scope
end

local function is_common(hash, field)
  local common = common_field(hash, field)
  return call('HGET', keys.contexts_new, common) or call('HGET', keys.contexts_old, common)
end

-- The context that a prompt continues: the deepest that is known, that all of its full blocks begin with, and that is
-- one run's alone.
local function context_of(turn, chain, fields)
  local newer = call('HMGET', keys.contexts_new, unpack(fields))
  local older = call('HMGET', keys.contexts_old, unpack(fields))
  for place = #fields, 1, -1 do
    local text = newer[place] or older[place]
    local depth, tokens, output, shared, run, branch, hash = match(text or '',
      '^(%d+) (%d+) (%d+) (%d+) (%S+) (%S+) (%x+)$')
    if depth and hash == hex(hash_at(chain, tonumber(depth)))
      and rules.continues(turn.tokens, tonumber(tokens), tonumber(output)) and not is_common(hash, fields[place]) then
      return { run = run, branch = branch, shared = tonumber(shared) }
    end
  end
end

-- Keeps the context of a turn of a run that is over. One whose full blocks are also all of another run's is common.
local function keep_context(field, run, blocks, hash, text)
  local former = call('HGET', keys.contexts_new, field) or call('HGET', keys.contexts_old, field)
  local depth, other, last = match(former or '', '^(%d+) %d+ %d+ %d+ (%S+) %S+ (%x+)$')
  if depth == blocks and last == hash and other ~= run then
    field, text = common_field(hash, field), ''
  end
  if call('HSET', keys.contexts_new, field, text) > 0
    and call('HLEN', keys.contexts_new) > terms.max_contexts then
    call('RENAME', keys.contexts_new, keys.contexts_old)
  end
end

-- Sub-agents that are done, and an agent that waits for its own, no longer count; the oldest of too many are forgotten.
local function drop_silent_branches(run, now_ms)
  local before_ms, branches, oldest, number = rules.silent_since_ms(now_ms), run.branches, nil, 0
  local has_others = next(branches, (next(branches)))
  for name, branch in pairs(branches) do
    number = number + 1
    if branch.busy == 0 and branch.seen_ms < before_ms and has_others then
      set_tokens(run, branch, 0)
    end
    if branch.busy == 0 and (not oldest or branch.seen_ms < branches[oldest].seen_ms
      or (branch.seen_ms == branches[oldest].seen_ms and name < oldest)) then
      oldest = name
    end
  end
  if number >= terms.max_branches and oldest then
    set_tokens(run, branches[oldest], 0)
    branches[oldest] = nil
    call('HDEL', keys.run .. run.name, 'branch:' .. oldest)
  end
end

-- Whose turn it is: the run and the branch, and the tokens that it shares with other runs. A named run that is known
-- stands as it is; else content counts, unless the prompt is not the whole of it.
local function named(turn, chain, samples, depths, fields)
  local known_run = turn.run ~= '' and read(turn.run)
  local known_branch = known_run and known_run.branches[turn.branch]
  if known_branch then
    return turn.run, turn.branch, known_branch.shared
  end
  local found = turn.stored_tokens == 0 and context_of(turn, chain, fields) or nil
  local _, deepest = prefix_index.find_holder(samples)
  local shared = deepest and min(turn.tokens, depths[deepest] * turn.block_tokens) or 0
  if turn.run ~= '' and (not found or found.run == turn.run or known_run) then
    return turn.run, turn.branch, found and found.run == turn.run and found.shared or shared
  elseif not found then
    return nil, nil, shared
  end
  local run = read(found.run)
  local branch = run and run.branches[found.branch]
  if branch and branch.busy > 0 then -- a fork
    return found.run, turn.branch ~= '' and turn.branch or hex(sub(chain, -8)), shared
  end
  return found.run, found.branch, found.shared
end

local function number_of(entries)
  local number = 0
  for _ in pairs(entries) do
    number = number + 1
  end
  return number
end

-- A turn that was reported before stays as it is, but for its place by the level of its tenant.
local function repeated(key, former, turn, now_ms)
  if not find(former, '^waits ') then
    return GOES
  end
  local run = read(match(former, '^%S+ (%S+)'))
  if run and run.waiting[key] and run.level ~= turn.level then
    run.level = turn.level
    list(run, now_ms)
  end
  return WAITS
end

local function key_of(turn)
  return turn.replica_id .. ' ' .. turn.id
end

-- The level of a turn's tenant by the work that it has sent, now. The call has read its book.
local function level_of(turn)
  if not turn.share then
    return 0
  end
  local name, weight, instances = unpack(turn.share)
  return (shares.level_of(books.kept.books[name], weight, instances))
end

-- Enters a turn that has come; returns GOES where it goes at once. One that was entered before stays as it is.
local function enter(turn, chain, capacity_tokens, now_ms)
  local key = key_of(turn)
  entered[key], figures().capacity_tokens, turn.level = true, capacity_tokens, level_of(turn)
  local former = call('HGET', keys.run_turns, key)
  if former then
    return repeated(key, former, turn, now_ms)
  end
  forget_oldest(now_ms)
  local blocks = turn.stored_tokens == 0 and #chain / 8 or 0
  local samples, depths = samples_of(chain, turn.stride)
  local fields = fields_of(samples, turn.scope)
  local name, branch_name, shared = named(turn, chain, samples, depths, fields)
  local last = hex(sub(chain, -8))
  local rest = format(' %d %d %d %s %s', turn.tokens, shared, blocks, last, hex(fields[#fields]))
  if not name then -- nothing names it: it counts from its second turn on
    call('HSET', keys.run_turns, key, 'first ' .. turn.prompt .. turn.scope .. ' ' .. turn.prompt .. rest)
    return GOES
  end
  local run = read(name)
  if not run then
    run = new_run(name)
    run.begun_ms, run.tenant, run.parent = now_ms, turn.tenant, turn.parent
  end
  see(run, now_ms)
  drop_silent_branches(run, now_ms)
  local branch = run.branches[branch_name]
  if not branch then
    branch = { tokens = 0, shared = shared, seen_ms = now_ms, busy = 0 }
    run.branches[branch_name] = branch
  elseif branch.busy == 0 then
    run.tool_ms = run.tool_ms + now_ms - branch.seen_ms
  end
  branch.seen_ms = now_ms
  set_tokens(run, branch, max(0, turn.tokens - branch.shared))
  local text = format('waits %s %s', name, branch_name) .. rest
  if run.active == 1 and not gives_way(run, now_ms) then
    send(run, key, text)
    return GOES
  elseif number_of(run.waiting) >= terms.max_waiting_turns then
    return REFUSED
  end
  deactivate(run)
  call('HSET', keys.run_turns, key, text)
  call('HSET', keys.run .. name, 'waits:' .. key, now_ms)
  run.waiting[key], ledger.waiting_turns = now_ms, ledger.waiting_turns + 1
  run.latest_ms, run.level = max(run.latest_ms, now_ms + turn.waits_ms), turn.level
  list(run, now_ms)
  let_go(now_ms)
  return gone[key] and GOES or WAITS
end

-- A turn is over, however it went; was_sent says whether an instance had it, instance_id is the one that it was on, or
-- ''. A run whose only turn in flight was refused has nothing in the memory for it, and gives its place up.
local function finish(key, output_tokens, prefill_ms, decode_ms, was_sent, instance_id, now_ms)
  local text = call('HGET', keys.run_turns, key)
  local state, name, branch_name, tokens, shared, blocks, last, field = match(text or '',
    '^(%S+) (%S+) (%S+) (%d+) (%d+) (%d+) (%x+) (%x+)$')
  call('HDEL', keys.run_turns, key)
  if not state then
    return
  end
  figures()
  if instance_id ~= '' and state ~= 'waits' and blocks ~= '0' then
    keep_context(gsub(field, '%x%x', function(byte)
      return string.char(tonumber(byte, 16))
    end), name, blocks, last, format('%d %d %d %d %s %s %s', blocks, tokens, output_tokens, shared, name, branch_name,
      last))
  end
  local run = state ~= 'first' and read(name)
  if not run then
    return
  end
  see(run, now_ms)
  if run.waiting[key] then
    run.waiting[key] = nil
    call('HDEL', keys.run .. name, 'waits:' .. key)
    ledger.waiting_turns = ledger.waiting_turns - 1
    if next(run.waiting) then
      list(run, now_ms) -- it waits since a later time, where this was the first one
    else
      unlist(run)
    end
  else
    local branch = run.branches[branch_name]
    run.busy = max(0, run.busy - 1)
    run.output_tokens = run.output_tokens + output_tokens
    run.prefill_ms, run.decode_ms = run.prefill_ms + prefill_ms, run.decode_ms + decode_ms
    run.home = instance_id ~= '' and instance_id or run.home
    if branch then
      branch.seen_ms, branch.busy = now_ms, max(0, branch.busy - 1)
      set_tokens(run, branch, branch.tokens + output_tokens)
    end
    if not was_sent and run.busy == 0 then
      deactivate(run)
    end
  end
  let_go(now_ms)
end

return {
  GOES = GOES,
  begin = begin,
  enter = enter,
  finish = finish,
  let_go = let_go,
  write_runs = write_runs,
  goes = function(turn)
    return gone[key_of(turn)] and GOES
  end,
}
