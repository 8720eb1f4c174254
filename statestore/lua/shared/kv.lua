-- Twin of statestore/ledger/kv.py. A chain is packed: 8 bytes a block, big-endian. Stamps fall along a chain, so the
-- lowest stamp is always a leaf and what is listed is closed under prefixes.
local BLOCKS_PER_CALL = 500

local function hit_blocks(kv_key, chain)
  local low, high = 0, #chain / 8
  while low < high do
    local middle = math.floor((low + high) / 2)
    if redis.call('ZSCORE', kv_key, string.sub(chain, middle * 8 + 1, middle * 8 + 8)) then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

local function stamp_chain(account, chain, block_tokens)
  local capacity = math.floor(account.kv_capacity_tokens / block_tokens)
  local blocks = math.min(#chain / 8, capacity)
  account.kv_stamp = account.kv_stamp + blocks
  for first = 0, blocks - 1, BLOCKS_PER_CALL do
    local pairs_ = {}
    for block = first, math.min(first + BLOCKS_PER_CALL, blocks) - 1 do
      pairs_[#pairs_ + 1] = account.kv_stamp - block
      pairs_[#pairs_ + 1] = string.sub(chain, block * 8 + 1, block * 8 + 8)
    end
    redis.call('ZADD', account.kv_key, unpack(pairs_))
  end
  local excess = redis.call('ZCARD', account.kv_key) - capacity
  if excess > 0 then
    redis.call('ZREMRANGEBYRANK', account.kv_key, 0, excess - 1)
  end
end
