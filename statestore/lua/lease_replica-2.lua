-- Renews a replica's lease, or ends it: the entry stays, expired, until a reaper has released the replica's requests and
-- removes it.
-- KEYS  1 replicas, 2 leader
-- ARGV  1 clock, 2 replica id, 3 lease ms, 0 to end it, 4 info as a JSON object of strings, 5 fence, to remove it, or ''
-- Reply 1, or 0 if the replica had no running lease of its own; removing: 1, or 0 if it is unknown or alive again;
--       error FENCED
-- include: clock, leases
local now_ms, text = store_now_ms(), redis.call('HGET', KEYS[1], ARGV[2])
local refused = fence_error(KEYS[2], ARGV[5], now_ms)
local alive, lease_ms = replica_alive(KEYS[1], ARGV[2], now_ms), tonumber(ARGV[3])
if refused then
  return refused
elseif ARGV[5] ~= '' then
  return alive and 0 or redis.call('HDEL', KEYS[1], ARGV[2])
elseif lease_ms > 0 or text then
  write_lease(KEYS[1], ARGV[2], lease_ms > 0 and now_ms + lease_ms or 0, lease_ms, lease_ms > 0, ARGV[4])
end
return alive and cjson.decode(text).beaten and 1 or 0
