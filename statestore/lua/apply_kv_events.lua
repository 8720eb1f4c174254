-- Applies what an engine reported of its KV cache.
-- ARGV  1 clock, 2 instance id, 3 fence, 4 sequence, 5 time of the last batch, 6 term of a booking in ms, 7 changes of names,
--       packed, 8 '1' if these are all names, 9 count of stored blocks, then these, then the removed ones
-- Reply how many of the stored blocks had been booked; error FENCED
local id = ARGV[2]
local kv_key, names_key, record_key = keys.kv .. id, keys.kv_names .. id, keys.kv_events .. id
-- Refuses what a former subscriber writes, and what follows from before the instance's cache was forgotten.
if redis.call('HGET', record_key, 'fence') ~= ARGV[3] then
  return redis.error_reply('FENCED fence ' .. ARGV[3] .. ' is no longer the claim of these KV events: claim them again')
end

-- Where the view is exact, takes back what was booked one to two terms ago and never confirmed.
local function end_bookings(instance, now_ms)
  local status, since_ms, stamp = unpack(redis.call('HMGET', record_key, 'status', 'booked_since_ms', 'booked_stamp'))
  if status ~= 'exact' or (since_ms and now_ms - since_ms < tonumber(ARGV[6])) then
    return
  end
  if since_ms then
    redis.call('ZREMRANGEBYSCORE', kv_key, '-inf', stamp)
  end
  redis.call('HSET', record_key, 'booked_since_ms', now_ms, 'booked_stamp', instance.kv_stamp)
end

local stored = tonumber(ARGV[9])
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
  end_bookings(instance, store_now_ms())
  instance.cached_blocks = redis.call('ZCARD', kv_key)
  write_record(instance)
end
return booked
