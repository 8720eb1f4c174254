-- Renews a lease of a replica or a subscriber, or ends it: the entry stays, expired, until a reaper has released the
-- replica's requests and removes it.
-- ARGV  1 clock, 2 replica id, 3 lease ms, 0 to end it, 4 info as a JSON object of strings, 5 fence, to remove it, or '',
--       6 '1' for a subscriber, '' for a replica
-- Reply 1, or 0 if the replica had no running lease of its own; removing: 1, or 0 if it is unknown or alive again;
--       error FENCED
local now_ms, key, id, lease_ms = store_now_ms(), ARGV[6] == '1' and keys.subscribers or keys.replicas, ARGV[2], tonumber(ARGV[3])
local refused, text, alive = fence_error(ARGV[5], now_ms), redis.call('HGET', key, id), replica_alive(key, id, now_ms)
if refused then
  return refused
elseif ARGV[5] ~= '' then
  return alive and 0 or redis.call('HDEL', key, id)
elseif lease_ms > 0 or text then
  write_lease(key, id, lease_ms > 0 and now_ms + lease_ms or 0, lease_ms, lease_ms > 0, ARGV[4])
end
return alive and cjson.decode(text).beaten and 1 or 0
