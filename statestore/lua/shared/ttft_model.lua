-- Twin of scheduling/ttft_model.py: an instance's expected TTFT, learned by recursive least squares. The account keeps
-- weights and covariance as JSON; an instance that has taught nothing has neither.
local FEATURES = 5
local KEEP = 0.98
local SURPRISE_SHARE = 0.2
local LEAST_TTFT_S = 0.1
local UNCERTAIN = 10

local PRIOR_WEIGHTS = { 0.03, 1, 1, 0, 0 }

local function prior()
  local covariance = {}
  for place = 1, FEATURES * FEATURES do
    covariance[place] = (place - 1) % (FEATURES + 1) == 0 and 1 or 0
  end
  return { unpack(PRIOR_WEIGHTS) }, covariance
end

local function dot(one, first, other)
  return one[first] * other[1] + one[first + 1] * other[2] + one[first + 2] * other[3] + one[first + 3] * other[4]
    + one[first + 4] * other[5]
end

-- The features in units that make all of them about one.
local function scaled(features)
  local queueing_ms, compute_ms, million_pairs, context_tokens = unpack(features)
  return { 1, queueing_ms / 1000, compute_ms / 1000, million_pairs / 100, context_tokens / 1000000 }
end

local function least_variance(covariance)
  local least = covariance[1]
  for place = 1, FEATURES * FEATURES, FEATURES + 1 do
    least = math.min(least, covariance[place])
  end
  return least
end

local function json_of(numbers)
  local texts = {}
  for place, number in ipairs(numbers) do
    texts[place] = exact(number)
  end
  return '[' .. table.concat(texts, ',') .. ']'
end

local function learn_ttft(account, features, ttft_s)
  local weights, covariance = prior()
  local known = redis.call('HMGET', account.key, 'ttft_weights', 'ttft_covariance')
  if known[1] and known[2] then
    local learned = cjson.decode(known[2])
    if least_variance(learned) > 0 then
      weights, covariance = cjson.decode(known[1]), learned
    end
  end
  local unit_s = math.max(LEAST_TTFT_S, ttft_s)
  local seen = scaled(features)
  for place = 1, FEATURES do
    seen[place] = seen[place] / unit_s
  end
  local surprise = ttft_s / unit_s - dot(weights, 1, seen)
  local trust = math.abs(surprise) > SURPRISE_SHARE and SURPRISE_SHARE / math.abs(surprise) or 1
  local spread, largest = {}, 0
  for row = 1, FEATURES do
    local first = (row - 1) * FEATURES
    spread[row] = dot(covariance, first + 1, seen)
    largest = math.max(largest, covariance[first + row])
  end
  local keep = largest < UNCERTAIN and KEEP or 1
  local gain = trust / (keep + trust * dot(seen, 1, spread))
  for row = 1, FEATURES do
    weights[row] = weights[row] + gain * spread[row] * surprise
    for column = 1, FEATURES do
      local place = (row - 1) * FEATURES + column
      covariance[place] = (covariance[place] - gain * (spread[row] * spread[column])) / keep
    end
  end
  redis.call('HSET', account.key, 'ttft_weights', json_of(weights), 'ttft_covariance', json_of(covariance))
end
