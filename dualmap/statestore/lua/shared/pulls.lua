-- Pulls of blocks from the cache of another instance, the source (scheduling/estimates/pulls.py). The stretch of time
-- that is booked on the link of a source is over by itself, or with a request that ends before.
local decoded = require('shared.decoded')
local instances = require('shared.instances')
local kv = require('shared.kv')
local prefix_index = require('shared.prefix_index')
local tiers = require('shared.tiers')
local tonumber, unpack = tonumber, unpack
local call, ceil, concat, max, min = redis.call, math.ceil, table.concat, math.max, math.min
local format, match, sub = string.format, string.match, string.sub

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

-- Books a pull of a request on the link of its source, behind what is booked there.
local function book(request_id, pull, now_ms)
  local own_ms = ceil(pull.own_s * 1000)
  local until_ms = max(now_ms, booked_until(pull.source)) + own_ms
  call('HSET', keys.instance_links, pull.source, until_ms)
  call('HSET', keys.request .. request_id, 'pull', format('%d %d %s', own_ms, until_ms, pull.source))
end

-- Gives back what is left of the time that a request has booked on the link of its source.
local function give_back(request_id, now_ms)
  local own_ms, until_ms, source = match(call('HGET', keys.request .. request_id, 'pull') or '', '^(%d+) (%d+) (.+)$')
  local left_ms = source and min(own_ms, until_ms - now_ms) or 0
  if left_ms > 0 and booked_until(source) > now_ms then
    call('HSET', keys.instance_links, source, format('%d', max(now_ms, booked_until(source) - left_ms)))
  end
end

-- Keeps the chain of a request that pulls, and its sampled prefixes, with its record: until its first token comes its
-- instance has none of what is pulled. An engine computes what another request of it is still pulling, so nothing is
-- listed there before.
local function keep_chain(request_key, chain, block_tokens, samples)
  call('HSET', request_key, 'chain', chain, 'block_tokens', block_tokens, 'samples', concat(samples))
end

-- Lists what a request has pulled, or computed where the pull failed, now that its first token came.
local function list_pulled(request, instance, now_ms)
  local chain, block_tokens, packed, told =
    unpack(call('HMGET', keys.request .. request.id, 'chain', 'block_tokens', 'samples', 'told'))
  if not packed then
    return
  end
  -- By now the instance may be known to have several cache groups.
  local prompt_tokens = (decoded(told) or {}).prompt_tokens or #chain / 8 * block_tokens
  local hit, stamp, listed = kv.hit_blocks(instance, chain, nil, kv.most_blocks(prompt_tokens, block_tokens))
  kv.stamp_chain(instance, chain, block_tokens, #chain / 8, hit, stamp, listed, prompt_tokens)
  tiers.stamp_chain(instance, chain, block_tokens, now_ms)
  local samples = {}
  for first = 1, #packed, 8 do
    samples[#samples + 1] = sub(packed, first, first + 7)
  end
  prefix_index.stamp_samples(samples, instance.id)
end

return {
  source_of = source_of,
  read_source = read_source,
  book = book,
  give_back = give_back,
  keep_chain = keep_chain,
  list_pulled = list_pulled,
}
