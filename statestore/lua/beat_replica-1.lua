-- Renews a replica's lease.
-- KEYS  1 replicas
-- ARGV  1 test clock ms or '', 2 replica id, 3 lease ms, 4 info as a JSON object of strings
-- Reply 1, or 0 if the replica had no running lease of its own
-- Clock the server's
-- include: clock
-- include: lease
local now_ms = store_now_ms()
local text = redis.call('HGET', KEYS[1], ARGV[2])
local known = 0
if text then
  local former = cjson.decode(text)
  if former.beaten and lease_runs(former.expires_ms, former.lease_ms, now_ms) then
    known = 1
  end
end
local lease_ms = tonumber(ARGV[3])
redis.call('HSET', KEYS[1], ARGV[2], cjson.encode({
  expires_ms = now_ms + lease_ms, lease_ms = lease_ms, beaten = true, info = cjson.decode(ARGV[4]),
}))
return known
