-- Makes a change that a caller derived from what it read, if that is still so: for what no request waits for.
-- ARGV  1 clock, 2 fence of the leader whose change it is, or ''; 3 about it, as JSON: read [[key, field, text, its
--       bytes or false], …], mistyped [[key, its right type], …], keys that are deleted if all of them are of another
--       type, instances {id: [{field of its record: value, …}, {count: by how much it grows, …}, [field that becomes
--       the time now, …]], …} where counts or blocks change, counted true where plans for these were made for other
--       figures, drawn, the draws of requests that the store lost, as their records have them, and queue_of, an
--       instance or ''; then for each command the number of its words, and these
-- Reply {now ms, what each command replied, …, and the queue of the instance queue_of or nil}, or nil if something is
--       no longer as it was read; error FENCED
local budgets = require('shared.budgets')
local instances = require('shared.instances')
local leases = require('shared.leases')
local write_books = require('shared.book_end')
local ipairs, pairs, type, unpack = ipairs, pairs, type, unpack
local decode, call, char = cjson.decode, redis.call, string.char

local FIRST_COMMAND = 4

local function change_pool(now_ms)
  local change = decode(ARGV[3])
  if ARGV[2] ~= '' then -- refuses the writes of a deposed leader
    local fence, expires_ms, lease_ms = unpack(call('HMGET', keys.leader, 'fence', 'expires_ms', 'lease_ms'))
    if fence ~= ARGV[2] or not leases.lease_runs(expires_ms, lease_ms, now_ms) then
      local advice = ' is no longer the leader\'s: stop leading and change nothing more'
      return redis.error_reply('FENCED fence ' .. ARGV[2] .. advice)
    end
  end
  for _, mistyped in ipairs(change.mistyped) do
    local found = call('TYPE', mistyped[1])
    found = type(found) == 'table' and found.ok or found
    if found == mistyped[2] or found == 'none' then
      return false
    end
  end
  for _, read in ipairs(change.read) do
    local text = type(read[3]) == 'table' and char(unpack(read[3])) or read[3]
    if call('HGET', read[1], read[2]) ~= text then
      return false
    end
  end
  for _, mistyped in ipairs(change.mistyped) do
    call('DEL', mistyped[1])
  end
  local replies, first = { now_ms }, FIRST_COMMAND
  while first <= #ARGV do
    local last = first + ARGV[first]
    replies[#replies + 1] = call(unpack(ARGV, first + 1, last))
    first = last + 1
  end
  if change.drawn[1] then
    budgets.draw_again(change.drawn, now_ms)
    write_books(now_ms)
  end
  for id, fields in pairs(change.instances) do
    local instance = instances.read(id)
    if instance then
      instance.described = nil
      for name, value in pairs(fields[1]) do
        instance[name] = value
      end
      for name, growth in pairs(fields[2]) do
        instance[name] = instance[name] + growth
      end
      for _, name in ipairs(fields[3]) do
        instance[name] = now_ms
      end
      instance.cached_blocks = call('ZCARD', keys.kv .. id)
      if change.counted then
        instances.write(instance)
      else
        instances.write_record(instance)
      end
    end
  end
  if change.queue_of ~= '' then
    replies[#replies + 1] = instances.room(instances.read(change.queue_of), now_ms)
  end
  return replies
end

return change_pool
