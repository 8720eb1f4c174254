-- Makes a change that a caller derived from what it read, if that is still so: for what no request waits for.
-- ARGV  1 clock, 2 fence of the leader whose change it is, or ''; 3 the change, as JSON: read [[key, field, text or
--       false], …], commands [[command, argument, …], …], instances {id: {field of its record: value, …}, …}, and
--       counted true where plans for these were made for other figures
-- Reply 1, or 0 if something is no longer as it was read; error FENCED
local refused, change = fence_error(ARGV[2], store_now_ms()), cjson.decode(ARGV[3])
if refused then
  return refused
end
for _, read in ipairs(change.read) do
  if redis.call('HGET', read[1], read[2]) ~= read[3] then
    return 0
  end
end
for _, command in ipairs(change.commands) do
  redis.call(unpack(command))
end
for id, fields in pairs(change.instances) do
  local instance = read_instance(id)
  if instance then
    for name, value in pairs(fields) do
      instance[name] = value
    end
    if change.counted then
      write_instance(instance)
    else
      write_record(instance)
    end
  end
end
return 1
