-- Changes how the KV metadata of an instance follow its events, or gives the instance back.
-- KEYS  1 record of the events, 2 names, 3 instance, 4 its KV metadata
-- ARGV  1 clock, 2 fence, 3 '1' to forget metadata, names and sequence, 4.. name, value, … of the record
-- Reply 1; error FENCED
-- include: kv_events
local refused = claim_error(KEYS[1], ARGV[2])
if refused then
  return refused
end
if ARGV[3] == '1' then
  redis.call('UNLINK', KEYS[2], KEYS[4])
  redis.call('HDEL', KEYS[1], 'sequence', 'published_s', 'booked_since_ms', 'booked_stamp')
  if redis.call('EXISTS', KEYS[3]) == 1 then
    redis.call('HSET', KEYS[3], 'cached_blocks', 0)
  end
end
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
return 1
