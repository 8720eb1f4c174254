-- Applies what an engine reported of its KV cache.
-- ARGV  1 clock, 2 instance id, 3 fence, 4 sequence, 5 time of the last batch, 6 term of a booking in ms, 7 count of stored
--       blocks, 8 of removed ones, 9 of names that are set, then the blocks; names set: name, value, …; names that are gone
-- Reply how many of the stored blocks had been booked; error FENCED
local id = ARGV[2]
local refused, kv_key, record_key = claim_error(id, ARGV[3]), keys.kv .. id, keys.kv_events .. id
if refused then
  return refused
end
local stored, removed, named = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local first_stored, first_removed = 10, 10 + stored
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
  booked = booked - redis.call('ZADD', kv_key, unpack(pairs_))
end
call('ZREM', kv_key, first_removed, first_name - 1)
call('HSET', keys.kv_names .. id, first_name, first_gone - 1)
call('HDEL', keys.kv_names .. id, first_gone, #ARGV)
redis.call('HSET', record_key, 'sequence', ARGV[4], 'published_s', ARGV[5])
local instance = read_instance(id)
if instance then
  end_bookings(instance, store_now_ms(), tonumber(ARGV[6]))
  instance.cached_blocks = redis.call('ZCARD', kv_key)
  write_load(instance)
end
return booked
