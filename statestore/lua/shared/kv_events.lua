-- The claim of a subscriber to the KV events of an instance, and the bookings that its events confirm.

-- Refuses what a former subscriber writes, and what follows from before the instance's cache was forgotten. '' is the fence
-- of one whose events no worker has claimed yet.
local function claim_error(id, fence)
  if (redis.call('HGET', keys.kv_events .. id, 'fence') or '') == fence then
    return nil
  end
  return redis.error_reply('FENCED fence ' .. fence .. ' is no longer the claim of these KV events: claim them again')
end

local function forget_sequence(id)
  redis.call('HDEL', keys.kv_events .. id, 'sequence', 'published_s', 'booked_since_ms', 'booked_stamp')
end

-- Forgets what was read: another claim starts from nothing. For an instance whose cache is believed to be empty.
local function forget_events(id)
  local key = keys.kv_events .. id
  redis.call('UNLINK', keys.kv_names .. id)
  if redis.call('HINCRBY', key, 'fence', 1) == 1 then
    redis.call('DEL', key)
  else
    forget_sequence(id)
    redis.call('HSET', key, 'status', 'estimate', 'reason', 'the instance went down')
  end
end

-- Where the view is exact, takes back what was booked one to two terms ago and never confirmed.
local function end_bookings(instance, now_ms, term_ms)
  local key = keys.kv_events .. instance.id
  local status, since_ms, stamp = unpack(redis.call('HMGET', key, 'status', 'booked_since_ms', 'booked_stamp'))
  if status ~= 'exact' or (since_ms and now_ms - since_ms < term_ms) then
    return
  end
  if since_ms then
    redis.call('ZREMRANGEBYSCORE', keys.kv .. instance.id, '-inf', stamp)
  end
  redis.call('HSET', key, 'booked_since_ms', now_ms, 'booked_stamp', instance.kv_stamp)
end
