-- include: lease
-- Leases of router replicas: JSON by id in one hash. A replica met through its requests alone has not beaten yet.
local FIRST_LEASE_MS = 10000

local function replica_alive(replicas_key, replica_id, now_ms)
  local text = redis.call('HGET', replicas_key, replica_id)
  if not text then
    return false
  end
  local replica = cjson.decode(text)
  return lease_runs(replica.expires_ms, replica.lease_ms, now_ms)
end

-- Of one without a running lease, too: a reaper that is about to forget it has not seen this request.
local function meet_replica(replicas_key, replica_id, now_ms)
  if not replica_alive(replicas_key, replica_id, now_ms) then
    redis.call('HSET', replicas_key, replica_id,
      cjson.encode({ expires_ms = now_ms + FIRST_LEASE_MS, lease_ms = FIRST_LEASE_MS, beaten = false, info = {} }))
  end
end
