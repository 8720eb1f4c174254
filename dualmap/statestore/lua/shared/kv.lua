-- What an instance's prefix cache is believed to hold: block hashes by LRU stamp. A chain is packed, eight bytes a
-- block. Stamps fall along a chain, so the lowest is always a leaf's and what is listed is closed under prefixes. The
-- stamp of a resident block is whole, that of one which is only reserved ends in a half. What the engine confirmed
-- (statestore/pool/kv_events.py) has a stamp from terms.confirmed on: above all others, and whole; no placement changes
-- or evicts it. It is closed under prefixes by itself. Where the engine evicts the end of it, the blocks that were
-- booked behind that end stay, after a gap, and are no hits.
local tonumber, unpack = tonumber, unpack
local call, format, sub = redis.call, string.format, string.sub
local ceil, floor, max, min = math.ceil, math.floor, math.max, math.min

local BLOCKS_PER_CALL = 500

-- The last of 1..most for which holds tells something, and what; 0 where there is none. Those for which it does come
-- before the others. Looks at the guess; behind it, or whether there is any; then halves what is left.
local function last_that(most, guess, holds)
  local least, told, second = 0, nil, true
  while least < most do
    local found = holds(guess)
    if found then
      least, told = guess, found
    else
      most = guess - 1
    end
    guess = second and (found and guess + 1 or 1) or floor((least + most + 1) / 2)
    second = false
  end
  return least, told
end

local function stamp_of(kv_key, chain, block)
  return call('ZSCORE', kv_key, sub(chain, block * 8 - 7, block * 8))
end

-- Blocks at the head of the chain that are listed, and the stamp of the last one. A guess, of another instance, may
-- help.
local function hit_blocks(id, chain, guess)
  local blocks, kv_key = #chain / 8, keys.kv .. id
  local hit, stamp = last_that(blocks, max(1, guess or ceil(blocks / 2)), function(block)
    return stamp_of(kv_key, chain, block)
  end)
  local first = hit > 1 and tonumber(stamp) < terms.confirmed and (stamp_of(kv_key, chain, 1) or 'missing')
  if first == 'missing' then
    return 0
  elseif first and tonumber(first) >= terms.confirmed then -- else nothing is confirmed, and there is no gap
    local confirmed, last = last_that(hit - 1, 1, function(block)
      local found = stamp_of(kv_key, chain, block)
      return found and tonumber(found) >= terms.confirmed and found
    end)
    if not stamp_of(kv_key, chain, confirmed + 1) then
      return confirmed, last
    end
  end
  return hit, stamp
end

-- Of so many listed blocks at the head of the chain, the last with this stamp, those that are resident; usually all.
local function resident_blocks(id, chain, hit, stamp)
  if hit == 0 or stamp % 1 == 0 then
    return hit
  end
  local kv_key = keys.kv .. id
  return (last_that(hit - 1, hit - 1, function(block)
    local found = stamp_of(kv_key, chain, block)
    return found and found % 1 == 0
  end))
end

-- Prompt tokens left to prefill after a hit, at least 1.
local function prefill_tokens(prompt_tokens, block_tokens, hit)
  return prompt_tokens - min(hit, floor((prompt_tokens - 1) / block_tokens)) * block_tokens
end

-- Enters a chain as the youngest: its first blocks as resident, the others as reserved. So many of its blocks are
-- listed, the last with this stamp: where that is confirmed, they are left alone. Evicts the oldest beyond capacity,
-- which what is confirmed does not count in.
local function stamp_chain(instance, chain, block_tokens, resident, hit, stamp)
  local capacity = floor(instance.kv_capacity_tokens / block_tokens)
  local settled = hit > 0 and tonumber(stamp) >= terms.confirmed and hit or 0
  local blocks, kv_key = min(#chain / 8, capacity), keys.kv .. instance.id
  instance.kv_stamp = instance.kv_stamp + blocks
  for first = settled, blocks - 1, BLOCKS_PER_CALL do
    local stamped, place = {}, 0
    for block = first, min(first + BLOCKS_PER_CALL, blocks) - 1 do
      stamped[place + 1] = instance.kv_stamp - block + (block < resident and 0 or 0.5)
      stamped[place + 2] = sub(chain, block * 8 + 1, block * 8 + 8)
      place = place + 2
    end
    instance.cached_blocks = instance.cached_blocks + call('ZADD', kv_key, 'GT', unpack(stamped))
  end
  if instance.cached_blocks > capacity then
    local beyond = call('ZCOUNT', kv_key, '-inf', format('(%d', terms.confirmed)) - capacity
    if beyond > 0 then
      call('ZREMRANGEBYRANK', kv_key, 0, beyond - 1)
    end
    instance.cached_blocks = call('ZCARD', kv_key)
  end
end

return {
  hit_blocks = hit_blocks,
  resident_blocks = resident_blocks,
  prefill_tokens = prefill_tokens,
  stamp_chain = stamp_chain,
}
