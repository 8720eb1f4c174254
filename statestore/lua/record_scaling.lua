-- Replaces the record of the last scaling decision, and adds a line to the log of scaling.
-- ARGV  1 clock, 2 fence, 3 fields by name as JSON, 4 line as JSON, 5 lines kept
-- Reply 1; error FENCED
local refused = fence_error(ARGV[2], store_now_ms())
if refused then
  return refused
end
redis.call('DEL', keys.scaling)
for name, text in pairs(cjson.decode(ARGV[3])) do
  redis.call('HSET', keys.scaling, name, text)
end
redis.call('LPUSH', keys.scaling_log, ARGV[4])
redis.call('LTRIM', keys.scaling_log, 0, ARGV[5] - 1)
return 1
