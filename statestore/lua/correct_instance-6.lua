-- Corrects an instance's counts and lists, if nothing has changed there since they were added up.
-- KEYS  1 leader, 2-5 instance, 6 least loaded
-- ARGV  1 clock, 2 instance id, 3 fence, 4 version that the sums are of, 5 sums as JSON: field, value;
--       6 JSON: entries of the queue to drop, 7 JSON: of the running ones
-- Reply 1, or 0 if it changed meanwhile; error FENCED
-- include: clock, instance, leases
local refused, instance = fence_error(KEYS[1], ARGV[3], store_now_ms()), read_instance(2)
if refused then
  return refused
elseif not instance or instance.version ~= tonumber(ARGV[4]) then
  return 0
end
for name, sum in pairs(cjson.decode(ARGV[5])) do
  instance[name] = sum
end
for place, key in ipairs({ instance.queue_key, instance.running_key }) do
  for _, entry in ipairs(cjson.decode(ARGV[5 + place])) do
    redis.call('ZREM', key, entry)
  end
end
write_instance(instance, ARGV[2], KEYS[6])
return 1
