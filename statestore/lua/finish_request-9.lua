-- Releases all that is left of a request.
-- KEYS  1 request, 2 samples, 3-6 instance, 7 least loaded, 8 leader, 9 replicas
-- ARGV  1 clock, 2 request id, 3 instance id, 4 replica id or '' for any, 5 attempt or '' for any,
--       6 fence or '': with one, only a request of a replica whose lease ran out, 7 what to note of it, as JSON, or ''
-- Reply queue or 'null', as prefill_request; 0 if nothing was left, another replica's request has the id or a newer
--       attempt lives; ['INSTANCE_ID'] where it really is; error FENCED
-- include: clock, leases, request, instance, terms
local now_ms, request = store_now_ms(), read_request(KEYS[1])
local refused = fence_error(KEYS[8], ARGV[6], now_ms)
if refused then
  return refused
elseif not request or (ARGV[4] ~= '' and request.replica_id ~= ARGV[4])
  or (ARGV[5] ~= '' and request.attempt > tonumber(ARGV[5]))
  or (ARGV[6] ~= '' and replica_alive(KEYS[9], request.replica_id, now_ms)) then
  return 0
elseif request.instance_id ~= ARGV[3] then
  return { request.instance_id }
end
redis.call('DEL', KEYS[1])
if ARGV[7] ~= '' then
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', terms.taught, '*', 'noted', ARGV[7])
end
local instance = read_instance(3)
if not instance then
  return 'null'
end
leave(instance, ARGV[2], request)
write_instance(instance, ARGV[3], KEYS[7])
return room_json(instance, now_ms)
