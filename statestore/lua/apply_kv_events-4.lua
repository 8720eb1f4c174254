-- Applies what an engine reported of its KV cache.
-- KEYS  1 record of the events, 2 names, 3 instance, 4 its KV metadata
-- ARGV  1 clock, 2 fence, 3 sequence, 4 time of the last batch, 5 term of a booking in ms, 6 count of stored blocks,
--       7 of removed ones, 8 of names that are set, then the blocks; names set: name, value, …; names that are gone
-- Reply how many of the stored blocks had been booked; error FENCED
-- include: clock, kv, kv_events
local refused = claim_error(KEYS[1], ARGV[2])
if refused then
  return refused
end
local stored, removed, named = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local first_stored, first_removed = 9, 9 + stored
local first_name = first_removed + removed
local first_gone = first_name + 2 * named
local booked = stored

-- In parts: a call takes some thousand arguments at most.
local function call(command, key, first, last)
  for place = first, last, 1000 do
    redis.call(command, key, unpack(ARGV, place, math.min(place + 999, last)))
  end
end

for first = first_stored, first_removed - 1, 500 do
  local pairs_ = {}
  for place = first, math.min(first + 499, first_removed - 1) do
    pairs_[#pairs_ + 1] = CONFIRMED
    pairs_[#pairs_ + 1] = ARGV[place]
  end
  booked = booked - redis.call('ZADD', KEYS[4], unpack(pairs_))
end
call('ZREM', KEYS[4], first_removed, first_name - 1)
call('HSET', KEYS[2], first_name, first_gone - 1)
call('HDEL', KEYS[2], first_gone, #ARGV)
redis.call('HSET', KEYS[1], 'sequence', ARGV[3], 'published_s', ARGV[4])
end_bookings(KEYS[1], KEYS[3], KEYS[4], store_now_ms(), tonumber(ARGV[5]))
redis.call('HSET', KEYS[3], 'cached_blocks', redis.call('ZCARD', KEYS[4]))
return booked
