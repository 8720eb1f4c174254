-- What tiers behind an instance's device are believed to hold: block hashes by the time of their last use, each tier a
-- key of its own. A tier is followed by its size.
local decoded = require('shared.decoded')
local kv = require('shared.kv')
local rules = require('rules')
local is_slow, load_time_s = rules.is_slow, rules.load_time_s
local ipairs, pairs, unpack = ipairs, pairs, unpack
local call, concat, format, sub = redis.call, table.concat, string.format, string.sub
local floor, max, min = math.floor, math.max, math.min

local BLOCKS_PER_CALL = 500
local STAMPS_PER_MS = 1024

local NONE = { tiers = {} }

-- The description of an instance's tiers, and of its part in pulls: {limits, tiers {{key, tokens, start_s, token_s},
-- …}, pull {host, port, layout, start_s, token_s} or nil}. Of a model with several cache groups it is not known which
-- of them a tier has, and a part of its blocks is no hit.
local function tiers_of(instance)
  local text = instance.hit_step_tokens == 0 and call('HGET', keys.instance_tiers, instance.id)
  return decoded(text) or NONE
end

-- Blocks of the chain behind the first so many that a tier lists, and the stamp of the last one. A chain leaves a tier
-- from its end on; one whose beginning left is no hit.
local function blocks_behind(tier, chain, first)
  local key, most = keys.kv_tier .. tier.key, #chain / 8 - first
  local function holds(block)
    return call('ZSCORE', key, sub(chain, (first + block) * 8 - 7, (first + block) * 8))
  end
  local found, stamp = kv.last_that(most, most, holds)
  if found < 2 or holds(1) then
    return found, stamp
  end
  return 0
end

-- The same of all tiers together, each behind those before it.
local function found_blocks(instance, chain, first)
  local taken = first
  for _, tier in ipairs(tiers_of(instance).tiers) do
    taken = taken + (blocks_behind(tier, chain, taken))
  end
  return taken - first
end

-- The loads from tiers that a request may have behind a hit, each its blocks, its own time, and the time with what is
-- booked before it: from the nearest tier alone, from two of them, …; an engine that takes no limits loads all. And
-- whether it forbids what is not known to be there, whether the engine takes limits, and what is in each tier.
local function loads_behind(instance, chain, block_tokens, prompt_tokens, hit)
  local described, loads, found = tiers_of(instance), {}, {}
  local most, taken, own_s = floor((prompt_tokens - 1) / block_tokens), hit, 0
  local queued_s, forbids = instance.loading_ms / 1000, described.limits and #described.tiers > 0
  for _, tier in ipairs(described.tiers) do
    forbids = forbids and is_slow(tier.token_s, instance.tokens_per_s)
    local listed, stamp = blocks_behind(tier, chain, taken)
    local blocks = min(listed, most - taken)
    if blocks > 0 then
      taken = taken + blocks
      found[#found + 1] = format('["%s",%d,%d]', tier.tier, blocks, stamp / STAMPS_PER_MS)
      own_s = max(own_s, load_time_s(tier.start_s, tier.token_s, blocks * block_tokens))
      loads[described.limits and #loads + 1 or 1] = { blocks = taken - hit, own_s = own_s, load_s = queued_s + own_s }
    end
  end
  return loads, forbids, described.limits, found
end

-- The load of all that the tiers have behind a hit; nil where they have nothing.
local function whole_load(instance, chain, block_tokens, prompt_tokens, hit)
  local loads, _, _, found = loads_behind(instance, chain, block_tokens, prompt_tokens, hit)
  local load = loads[#loads]
  if load then
    load.found, load.most_tokens = found, -1
  end
  return load
end

-- Enters a chain as the last that was used, its first block as the youngest, into every tier; forgets what is beyond
-- the size of each.
local function stamp_chain(instance, chain, block_tokens, now_ms)
  for _, tier in ipairs(tiers_of(instance).tiers) do
    local key, capacity = keys.kv_tier .. tier.key, floor(tier.tokens / block_tokens)
    local blocks = min(#chain / 8, capacity)
    for first = 0, blocks - 1, BLOCKS_PER_CALL do
      local stamped = {}
      for block = first, min(first + BLOCKS_PER_CALL, blocks) - 1 do
        stamped[#stamped + 1] = now_ms * STAMPS_PER_MS - block
        stamped[#stamped + 1] = sub(chain, block * 8 + 1, block * 8 + 8)
      end
      call('ZADD', key, 'GT', unpack(stamped))
    end
    local beyond = call('ZCARD', key) - capacity
    if beyond > 0 then
      call('ZREMRANGEBYRANK', key, 0, beyond - 1)
    end
  end
end

-- Blocks of the chain behind the first so many that the host memory of an instance has.
local function host_blocks(instance, chain, first)
  local nearest = tiers_of(instance).tiers[1]
  return nearest and nearest.tier == 'host' and (blocks_behind(nearest, chain, first)) or 0
end

-- What is loaded, or pulled, on each of some instances, as a placement replies it.
local function text_of(loads)
  local texts = {}
  for id, load in pairs(loads) do
    local pulled = load.pull and format(',["%s","%s",%d,%d,%.17g]', load.pull.source, load.pull.host, load.pull.port,
      load.pull.tokens, load.pull.own_s) or ''
    texts[#texts + 1] = format('"%s":[%d,%.17g,%.17g,%d,[%s]%s]', id, load.blocks, load.load_s, load.own_s,
      load.most_tokens, concat(load.found, ','), pulled)
  end
  return '{' .. concat(texts, ',') .. '}'
end

return {
  tiers_of = tiers_of,
  found_blocks = found_blocks,
  host_blocks = host_blocks,
  loads_behind = loads_behind,
  whole_load = whole_load,
  stamp_chain = stamp_chain,
  text_of = text_of,
}
