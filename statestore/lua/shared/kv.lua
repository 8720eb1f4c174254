-- Twin of statestore/ledger/kv.py. A chain is packed: 8 bytes a block, big-endian. Stamps fall along a chain, so the
-- lowest stamp is always a leaf and what is listed is closed under prefixes. The stamp of a given block is whole, that
-- of one that is only promised is broken.
local BLOCKS_PER_CALL = 500
local PROMISED = 0.5

local function stamp_of(kv_key, chain, block)
  return redis.call('ZSCORE', kv_key, string.sub(chain, block * 8 - 7, block * 8))
end

-- How many blocks at the head of a chain hold a property that is closed under prefixes: from least to most of them.
local function head_blocks(least, most, holds)
  while least < most do
    local middle = math.floor((least + most) / 2)
    if holds(middle + 1) then
      least = middle + 1
    else
      most = middle
    end
  end
  return least
end

local function hit_blocks(kv_key, chain)
  return head_blocks(0, #chain / 8, function(block)
    return stamp_of(kv_key, chain, block)
  end)
end

-- Blocks at the head of the chain that are given; cheap if it is as many as the guess.
local function given_blocks(kv_key, chain, guess)
  local function is_given(block)
    local stamp = stamp_of(kv_key, chain, block)
    return stamp and tonumber(stamp) % 1 == 0
  end
  local blocks = #chain / 8
  guess = math.max(0, math.min(guess, blocks))
  if guess > 0 and not is_given(guess) then
    return head_blocks(0, guess - 1, is_given)
  end
  if guess == blocks or not is_given(guess + 1) then
    return guess
  end
  return head_blocks(guess + 1, blocks, is_given)
end

local function capacity_blocks(account, block_tokens)
  return math.floor(account.kv_capacity_tokens / block_tokens)
end

-- Prompt tokens left to prefill after a hit of so many blocks, at least 1; twin of Chain.uncached_tokens.
local function uncached_tokens_after(request, hit)
  local blocks = math.min(hit, math.floor((request.prompt_tokens - 1) / request.block_tokens))
  return request.prompt_tokens - blocks * request.block_tokens
end

-- Uncached tokens of a request, by what the instance has been given; its count until now is the guess. A request here
-- has prompt_tokens, block_tokens and uncached_tokens.
local function uncached_tokens_now(account, chain, request)
  local prompt_tokens, block_tokens = request.prompt_tokens, request.block_tokens
  local guess = math.floor((prompt_tokens - request.uncached_tokens) / block_tokens)
  local given = math.min(given_blocks(account.kv_key, chain, guess), capacity_blocks(account, block_tokens))
  return uncached_tokens_after(request, given)
end

-- Enters a chain as the youngest, its first blocks as given, the others as promised.
local function stamp_chain(account, chain, block_tokens, given)
  local capacity = capacity_blocks(account, block_tokens)
  local blocks = math.min(#chain / 8, capacity)
  account.kv_stamp = account.kv_stamp + blocks
  for first = 0, blocks - 1, BLOCKS_PER_CALL do
    local pairs_ = {}
    for block = first, math.min(first + BLOCKS_PER_CALL, blocks) - 1 do
      pairs_[#pairs_ + 1] = account.kv_stamp - block + (block < given and 0 or PROMISED)
      pairs_[#pairs_ + 1] = string.sub(chain, block * 8 + 1, block * 8 + 8)
    end
    redis.call('ZADD', account.kv_key, unpack(pairs_))
  end
  local excess = redis.call('ZCARD', account.kv_key) - capacity
  if excess > 0 then
    redis.call('ZREMRANGEBYRANK', account.kv_key, 0, excess - 1)
  end
end
