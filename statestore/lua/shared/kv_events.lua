-- The claim of a subscriber to the KV events of an instance, and the bookings that its events confirm.

-- Refuses what a former subscriber writes, and what follows from before the instance's cache was forgotten.
local function claim_error(record_key, fence)
  if redis.call('HGET', record_key, 'fence') == fence then
    return nil
  end
  return redis.error_reply('FENCED fence ' .. fence .. ' is no longer the claim of these KV events: claim them again')
end

-- Forgets what was read: another claim starts anew. For an instance whose cache is believed to be empty.
local function forget_events(record_key, names_key)
  redis.call('UNLINK', names_key)
  if redis.call('HINCRBY', record_key, 'fence', 1) == 1 then
    redis.call('DEL', record_key)
  else
    redis.call('HDEL', record_key, 'sequence', 'published_s', 'booked_since_ms', 'booked_stamp')
    redis.call('HSET', record_key, 'status', 'estimate', 'reason', 'the instance went down')
  end
end

-- Where the view is exact, takes back what was booked one to two terms ago and never confirmed.
local function end_bookings(record_key, instance_key, kv_key, now_ms, term_ms)
  local status, since_ms, stamp = unpack(redis.call('HMGET', record_key, 'status', 'booked_since_ms', 'booked_stamp'))
  if status ~= 'exact' or (since_ms and now_ms - since_ms < term_ms) then
    return
  end
  if since_ms then
    redis.call('ZREMRANGEBYSCORE', kv_key, '-inf', stamp)
  end
  redis.call('HSET', record_key, 'booked_since_ms', now_ms, 'booked_stamp', redis.call('HGET', instance_key, 'kv_stamp'))
end
