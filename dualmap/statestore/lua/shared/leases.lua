-- Leases of replicas and of the leader.
local tonumber = tonumber
local call, format, match = redis.call, string.format, string.match

-- Whether a lease with this end and this length is valid now. One with more than twice its length left was taken before
-- the clock was set back (statestore/leases.py).
local function lease_runs(expires_ms, lease_ms, now_ms)
  local left_ms = (tonumber(expires_ms or 0) or 0) - now_ms
  return left_ms > 0 and left_ms <= 2 * (tonumber(lease_ms or 0) or 0)
end

-- The last lease that was parsed, and its text.
local last_lease = {}

-- No request is without a lease, JSON by id in one hash: its replica gets a first one if it has none that runs, which
-- it has not beaten for.
local function lease_first(replica_id, now_ms)
  local text = call('HGET', keys.replicas, replica_id) or ''
  if last_lease.text ~= text then
    -- Parsed without cjson: every placement does this, and decoding all of it would take longer than the rest.
    last_lease.text = text
    last_lease.expires_ms, last_lease.lease_ms = match(text, '"expires_ms":(%d+),"lease_ms":(%d+)')
  end
  if not lease_runs(last_lease.expires_ms, last_lease.lease_ms, now_ms) then
    local form = '{"expires_ms":%d,"lease_ms":%d,"beaten":false,"info":{}}'
    call('HSET', keys.replicas, replica_id, format(form, now_ms + terms.first_lease_ms, terms.first_lease_ms))
  end
end

return { lease_runs = lease_runs, lease_first = lease_first }
