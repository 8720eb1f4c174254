-- Twin of statestore/ledger/text_ratio.py: bytes per token, learned; a published change counts as a new epoch.
local MEMORY_TOKENS = 4000000
local MIN_TOKENS = 16384
local TOLERANCE = 0.1
local LEAST_RATIO = 0.001

local function learn_text_ratio(meta_key, prior, prompt_bytes, prompt_tokens)
  local known = redis.call('HMGET', meta_key, 'prompt_bytes', 'prompt_tokens', 'bytes_per_token')
  local bytes = tonumber(known[1] or 0) + prompt_bytes
  local tokens = tonumber(known[2] or 0) + prompt_tokens
  local published = tonumber(known[3] or prior)
  if tokens > MEMORY_TOKENS then
    bytes = math.floor(bytes / 2)
    tokens = math.floor(tokens / 2)
  end
  redis.call('HSET', meta_key, 'prompt_bytes', bytes, 'prompt_tokens', tokens)
  if tokens < MIN_TOKENS then
    return
  end
  local learned = math.max(LEAST_RATIO, bytes / tokens)
  if math.abs(learned - published) > TOLERANCE * published then
    redis.call('HSET', meta_key, 'bytes_per_token', string.format('%.17g', learned))
    redis.call('HINCRBY', meta_key, 'epoch', 1)
  end
end
