-- What an instance's prefix cache is believed to hold: block hashes by LRU stamp. A chain is packed, eight bytes a block.
-- Stamps fall along a chain, so the lowest is always a leaf's and what is listed is closed under prefixes. The stamp of a
-- resident block is whole, that of one which is only reserved ends in a half.
-- What the engine confirmed (shared/kv_events.lua) has the stamp CONFIRMED: above all others, and whole; no placement
-- changes or evicts it.
local BLOCKS_PER_CALL, CONFIRMED = 500, '9007199254740992'

-- The last of 1..most that holds, 0 where none does: those that hold come before the others. Tries the guess first.
local function last_that(most, guess, holds)
  local least = 0
  while least < most do
    if holds(guess) then
      least = guess
    else
      most = guess - 1
    end
    guess = math.floor((least + most + 1) / 2)
  end
  return least
end

local function stamp_of(kv_key, chain, block)
  return redis.call('ZSCORE', kv_key, string.sub(chain, block * 8 - 7, block * 8))
end

-- Blocks at the head of the chain that are listed.
local function hit_blocks(id, chain)
  local blocks, kv_key = #chain / 8, keys.kv .. id
  return last_that(blocks, math.ceil(blocks / 2), function(block) return stamp_of(kv_key, chain, block) end)
end

-- Of so many listed blocks at the head of the chain, those that are resident; usually all.
local function resident_blocks(id, chain, hit)
  local kv_key = keys.kv .. id
  return last_that(hit, hit, function(block) return stamp_of(kv_key, chain, block) % 1 == 0 end)
end

-- Prompt tokens left to prefill after a hit, at least 1.
local function uncached_tokens(prompt_tokens, block_tokens, hit)
  return prompt_tokens - math.min(hit, math.floor((prompt_tokens - 1) / block_tokens)) * block_tokens
end

-- Enters a chain as the youngest: its first blocks as resident, the others as reserved. Evicts the oldest beyond capacity,
-- which what is confirmed does not count in.
local function stamp_chain(instance, chain, block_tokens, resident)
  local capacity = math.floor(instance.described.kv_capacity_tokens / block_tokens)
  local blocks, kv_key = math.min(#chain / 8, capacity), keys.kv .. instance.id
  instance.kv_stamp = instance.kv_stamp + blocks
  for first = 0, blocks - 1, BLOCKS_PER_CALL do
    local pairs_ = {}
    for block = first, math.min(first + BLOCKS_PER_CALL, blocks) - 1 do
      pairs_[#pairs_ + 1] = instance.kv_stamp - block + (block < resident and 0 or 0.5)
      pairs_[#pairs_ + 1] = string.sub(chain, block * 8 + 1, block * 8 + 8)
    end
    redis.call('ZADD', kv_key, 'GT', unpack(pairs_))
  end
  instance.cached_blocks = redis.call('ZCARD', kv_key)
  local beyond = instance.cached_blocks > capacity
    and redis.call('ZCOUNT', kv_key, '-inf', '(' .. CONFIRMED) - capacity or 0
  if beyond > 0 then
    redis.call('ZREMRANGEBYRANK', kv_key, 0, beyond - 1)
    instance.cached_blocks = instance.cached_blocks - beyond
  end
end
