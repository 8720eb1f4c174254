-- Enters a live request that the store may have lost, as it is; a known one stays.
-- KEYS  1 request, 2 replicas, 3-6 instance, 7 least loaded
-- ARGV  1 clock, 2 request id, 3 instance id, 4 its rank where it is held, 5.. its fields: name, value, …
-- Reply 1 if it was entered, 0 if it is known or its instance is not
-- include: clock, leases, request
local now_ms, instance = store_now_ms(), read_instance(3)
if not instance or redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('HSET', KEYS[1], unpack(ARGV, 5))
local request = read_request(KEYS[1])
enter(instance, ARGV[2], request, ARGV[4], now_ms)
lease_first(KEYS[2], request.replica_id, now_ms)
write_instance(instance, ARGV[3], KEYS[7])
return 1
