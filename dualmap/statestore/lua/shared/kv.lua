-- What an instance's prefix cache is believed to hold: block hashes by LRU stamp. A chain is packed, eight bytes a
-- block. Stamps fall along a chain, so the lowest is always a leaf's and what is listed is closed under prefixes. The
-- stamp of a resident block is whole, that of one which is only reserved ends in a half. What the engine confirmed
-- (statestore/pool/kv_events.py) has a stamp from terms.confirmed on: above all others, and whole; no placement changes
-- or evicts it. It is closed under prefixes by itself. Where the engine evicts the end of it, the blocks that were
-- booked behind that end stay, after a gap, and are no hits.
--
-- Of an instance with several cache groups a hit ends at some blocks only, its hit ends
-- (scheduling/prompts/cache_groups.py). The stamp of any other listed block, an inner one, is from terms.inner on where
-- it is confirmed, and else ends in a quarter or three quarters.
local ipairs, tonumber, unpack = ipairs, tonumber, unpack
local call, format, sub = redis.call, string.format, string.sub
local ceil, floor, max, min = math.ceil, math.floor, math.max, math.min

local BLOCKS_PER_CALL = 500
local BLOCKS_PER_LOOK = 50

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

local function is_inner(stamp)
  stamp = tonumber(stamp)
  return stamp >= terms.inner or stamp % 0.5 ~= 0
end

-- The last hit end among so many listed blocks at the head of the chain, and its stamp; 0 where there is none.
local function last_end(kv_key, chain, listed)
  for last = listed, 1, -BLOCKS_PER_LOOK do
    local first, blocks = max(1, last - BLOCKS_PER_LOOK + 1), {}
    for block = first, last do
      blocks[#blocks + 1] = sub(chain, block * 8 - 7, block * 8)
    end
    local stamps = call('ZMSCORE', kv_key, unpack(blocks))
    for place = #stamps, 1, -1 do
      if not is_inner(stamps[place]) then
        return first + place - 1, stamps[place]
      end
    end
  end
  return 0
end

-- Blocks at the head of the chain that are listed, and the stamp of the last one. A guess, of another instance, may
-- help.
local function listed_blocks(id, chain, guess)
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

-- Blocks of a prompt that may be hits: its last token is computed in any case.
local function most_blocks(prompt_tokens, block_tokens)
  return floor((prompt_tokens - 1) / block_tokens)
end

-- The hit of a chain where the engine computes the last blocks of what full attention has, of so many at most, again;
-- the stamp of its last block, and the listed blocks.
local function kept_blocks(instance, chain, guess, most)
  local listed, kv_key = listed_blocks(instance.id, chain, guess), keys.kv .. instance.id
  local hit = max(0, min(listed, most or listed) - instance.dropped_blocks)
  local stamp = hit > 0 and stamp_of(kv_key, chain, hit) or nil
  if stamp and is_inner(stamp) then
    hit, stamp = last_end(kv_key, chain, hit)
  end
  return hit, stamp, listed
end

-- The hit of a chain, of so many blocks at most where that decides where it ends; the stamp of its last block; and
-- where the instance has several cache groups its listed blocks, which are the hit elsewhere. A guess, of another
-- instance, may help.
local function hit_blocks(instance, chain, guess, most)
  if instance.dropped_blocks > 0 then
    return kept_blocks(instance, chain, guess, most)
  elseif instance.hit_step_tokens == 0 then
    return listed_blocks(instance.id, chain, guess)
  end
  local listed, stamp = listed_blocks(instance.id, chain, guess)
  local within, kv_key = min(listed, most), keys.kv .. instance.id
  if within > 0 and is_inner(within < listed and stamp_of(kv_key, chain, within) or stamp) then
    local hit, last = last_end(kv_key, chain, within)
    return hit, last, listed
  end
  return listed, stamp, listed
end

-- Of a hit of so many blocks, the last with this stamp, those that are resident; usually all.
local function resident_blocks(id, chain, hit, stamp)
  if hit == 0 or stamp % 1 < 0.5 then
    return hit
  end
  local kv_key = keys.kv .. id
  local resident, last = last_that(hit - 1, hit - 1, function(block)
    local found = stamp_of(kv_key, chain, block)
    return found and found % 1 < 0.5 and found
  end)
  return resident > 0 and is_inner(last) and (last_end(kv_key, chain, resident)) or resident
end

-- Prompt tokens left to prefill after a hit, at least 1.
local function prefill_tokens(prompt_tokens, block_tokens, hit)
  return prompt_tokens - min(hit, floor((prompt_tokens - 1) / block_tokens)) * block_tokens
end

-- Blocks up to the last step within so many tokens.
local function end_within(tokens, block_tokens, step_tokens)
  return floor(floor(tokens / step_tokens) * step_tokens / block_tokens)
end

-- Of an instance with several cache groups, the blocks of the chain that are hit ends once it is computed: those that
-- are so already, and what the prompt leaves (ends_left, scheduling/prompts/cache_groups.py).
local function ends_of(instance, chain, block_tokens, hit, listed, prompt_tokens)
  local step, ends = instance.hit_step_tokens, {}
  for first = 1, listed, BLOCKS_PER_CALL do
    local blocks = {}
    for block = first, min(first + BLOCKS_PER_CALL - 1, listed) do
      blocks[#blocks + 1] = sub(chain, block * 8 - 7, block * 8)
    end
    for place, stamp in ipairs(call('ZMSCORE', keys.kv .. instance.id, unpack(blocks))) do
      ends[first + place - 1] = stamp and not is_inner(stamp)
    end
  end
  local dropped = instance.dropped_blocks > 0 and step or 0 -- the step of which the end is computed again
  ends[end_within(max(0, prompt_tokens - 1 - dropped), block_tokens, step)] = true
  if listed > hit then
    ends[end_within(max(0, listed * block_tokens - dropped), block_tokens, step)] = true
  end
  return ends
end

-- Stamps and blocks of one call. One list for all of them: a new one would grow with every other block.
local stamped = {}

-- Enters the chain of a prompt as the youngest: its first blocks as resident, the others as reserved. So many of its
-- blocks are a hit, the last with this stamp, and so many listed: where the hit is confirmed, it is left alone. Evicts
-- the oldest beyond capacity, which what is confirmed does not count in.
local function stamp_chain(instance, chain, block_tokens, resident, hit, stamp, listed, prompt_tokens)
  local capacity = floor(instance.kv_capacity_tokens / block_tokens)
  local settled = hit > 0 and tonumber(stamp) >= terms.confirmed and hit or 0
  local blocks, kv_key = min(#chain / 8, capacity), keys.kv .. instance.id
  local ends = instance.hit_step_tokens > 0 and ends_of(instance, chain, block_tokens, hit, listed, prompt_tokens)
  local youngest = instance.kv_stamp + blocks
  instance.kv_stamp = youngest
  for first = settled, blocks - 1, BLOCKS_PER_CALL do
    local place = 0
    for block = first, min(first + BLOCKS_PER_CALL, blocks) - 1 do
      stamped[place + 1] = youngest - block + (block < resident and 0 or 0.5)
      if ends and not ends[block + 1] then
        stamped[place + 1] = stamped[place + 1] + 0.25
      end
      stamped[place + 2] = sub(chain, block * 8 + 1, block * 8 + 8)
      place = place + 2
    end
    instance.cached_blocks = instance.cached_blocks + call('ZADD', kv_key, 'GT', unpack(stamped, 1, place))
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
  last_that = last_that,
  most_blocks = most_blocks,
  hit_blocks = hit_blocks,
  resident_blocks = resident_blocks,
  prefill_tokens = prefill_tokens,
  stamp_chain = stamp_chain,
}
