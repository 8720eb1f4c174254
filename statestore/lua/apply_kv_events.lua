-- Applies what an engine reported of its KV cache.
-- ARGV  1 clock, 2 instance id, 3 fence, 4 sequence, 5 time of the last batch, 6 term of a booking in ms, 7 changes of names,
--       packed, 8 '1' if these are all names, 9 count of stored blocks, then these, then the removed ones
-- Reply how many of the stored blocks had been booked; error FENCED
local id = ARGV[2]
local refused, kv_key, record_key = claim_error(id, ARGV[3]), keys.kv .. id, keys.kv_events .. id
if refused then
  return refused
end
local stored, names_key = tonumber(ARGV[9]), keys.kv_names .. id
local first_stored, first_removed = 10, 10 + stored
local booked, stamp = stored, string.format('%d', CONFIRMED + ARGV[4] % CONFIRMED)

for first = first_stored, first_removed - 1, 500 do
  local pairs_ = {}
  for place = first, math.min(first + 499, first_removed - 1) do
    pairs_[#pairs_ + 1] = stamp
    pairs_[#pairs_ + 1] = ARGV[place]
  end
  booked = booked - redis.call('ZADD', kv_key, unpack(pairs_))
end
for place = first_removed, #ARGV, 1000 do  -- a call takes some thousand arguments at most
  redis.call('ZREM', kv_key, unpack(ARGV, place, math.min(place + 999, #ARGV)))
end
if ARGV[8] == '1' then
  redis.call('UNLINK', names_key)
end
if ARGV[7] ~= '' then
  redis.call('RPUSH', names_key, ARGV[7])
end
redis.call('HSET', record_key, 'sequence', ARGV[4], 'published_s', ARGV[5])
local instance = read_instance(id)
if instance then
  end_bookings(instance, store_now_ms(), tonumber(ARGV[6]))
  instance.cached_blocks = redis.call('ZCARD', kv_key)
  write_record(instance)
end
return booked
