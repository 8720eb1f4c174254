-- Releases all that is left of a request.
-- ARGV  1 clock, 2 request id, 3 replica id or '' for any, 4 attempt or '' for any, 5 fence or '': with one, only a request of
--       a replica whose lease ran out, 6 what to note of it, as JSON, or ''
-- Reply queue (queue_json), 'null' where it has no room or is empty; 0 if nothing was left, another replica's request has
--       the id or a newer attempt lives; error FENCED
-- include: clock, leases, request
local now_ms, request = store_now_ms(), read_request(ARGV[2])
local refused = fence_error(ARGV[5], now_ms)
if refused then
  return refused
elseif not request or (ARGV[3] ~= '' and request.told.replica_id ~= ARGV[3])
  or (ARGV[4] ~= '' and request.told.attempt > tonumber(ARGV[4]))
  or (ARGV[5] ~= '' and replica_alive(keys.replicas, request.told.replica_id, now_ms)) then
  return 0
end
redis.call('DEL', keys.request .. ARGV[2])
if ARGV[6] ~= '' then
  redis.call('XADD', keys.samples, 'MAXLEN', '~', terms.taught, '*', 'noted', ARGV[6])
end
local instance = read_instance(request.instance_id)
if not instance then
  return 'null'
end
leave(instance, request)
write_instance(instance)
return room_json(instance, now_ms)
