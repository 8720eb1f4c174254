-- Corrects an instance's counts and lists, if nothing has changed there since they were added up.
-- ARGV  1 clock, 2 instance id, 3 fence, 4 version that the sums are of, 5 sums by field, as JSON; 6 entries of its queue to
--       drop, 7 of its running ones, as JSON
-- Reply 1, or 0 if it changed meanwhile; error FENCED
local refused, instance = fence_error(ARGV[3], store_now_ms()), read_instance(ARGV[2])
if refused then
  return refused
elseif not instance or instance.version ~= tonumber(ARGV[4]) then
  return 0
end
for name, sum in pairs(cjson.decode(ARGV[5])) do
  instance[name] = sum
end
for place, key in ipairs({ keys.queue .. ARGV[2], keys.running .. ARGV[2] }) do
  for _, entry in ipairs(cjson.decode(ARGV[5 + place])) do
    redis.call('ZREM', key, entry)
  end
end
write_instance(instance)
return 1
