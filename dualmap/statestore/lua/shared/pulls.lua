-- Pulls of blocks from the cache of another instance, the source (scheduling/estimates/pulls.py). The stretch of time
-- that is booked on the link of a source is over by itself.
local instances = require('shared.instances')
local kv = require('shared.kv')
local tiers = require('shared.tiers')
local tonumber = tonumber
local call, ceil, max = redis.call, math.ceil, math.max

-- Instances in these states still have what they computed.
local SERVES = { ready = true, draining = true, standby = true }

-- The time of the store's clock until which the link of an instance is booked as a source.
local function booked_until(id)
  return tonumber(call('HGET', keys.instance_links, id) or 0) or 0
end

-- An instance as a source of a chain: its end, the blocks that it serves, how long its link is booked, how long it
-- loads and computes what is listed but may not be there yet, and whether it leaves. Nil where it serves none.
local function source_of(instance, chain, hit, stamp, now_ms)
  local pull_end = SERVES[instance.state] and tiers.tiers_of(instance).pull
  if not pull_end then
    return
  end
  local blocks = kv.resident_blocks(instance.id, chain, hit, stamp)
  local confirmed = blocks > 0 and tonumber(stamp) >= terms.confirmed
  return { id = instance.id, pull_end = pull_end, blocks = blocks + tiers.host_blocks(instance, chain, blocks),
    leaves = instance.state ~= 'ready', queued_s = max(0, booked_until(instance.id) - now_ms) / 1000,
    computing_s = confirmed and 0 or instance.loading_ms / 1000 + instance.dispatched_tokens / instance.tokens_per_s }
end

-- The instance of this id as a source; nil where it is none.
local function read_source(id, chain, most, now_ms)
  local instance = instances.read(id)
  if instance then
    local hit, stamp = kv.hit_blocks(instance, chain, nil, most)
    return source_of(instance, chain, hit, stamp, now_ms)
  end
end

-- Books a pull on the link of its source, behind what is booked there.
local function book(pull, now_ms)
  local from_ms = max(now_ms, booked_until(pull.source))
  call('HSET', keys.instance_links, pull.source, from_ms + ceil(pull.own_s * 1000))
end

return { source_of = source_of, read_source = read_source, book = book }
