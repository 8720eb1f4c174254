-- Enters a live request that the store may have lost, as it is; a known one stays.
-- ARGV  1 clock, 2 request id, 3 its rank where it is held, 4 and 5 where it was placed and what its replica told, as JSON
-- Reply 1 if it was entered, 0 if it is known or its instance is not
local now_ms, key, instance = store_now_ms(), keys.request .. ARGV[2], read_instance(cjson.decode(ARGV[4]).instance_id)
if not instance or redis.call('EXISTS', key) == 1 then
  return 0
end
redis.call('HSET', key, 'placed', ARGV[4], 'told', ARGV[5])
local request = read_request(ARGV[2], 'told')
enter(instance, request, ARGV[3], now_ms)
lease_first(request.told.replica_id, now_ms)
write_instance(instance)
return 1
