-- Changes how the KV metadata of an instance follow its events, or gives the instance back.
-- ARGV  1 clock, 2 instance id, 3 fence, 4 '1' to forget metadata, names and sequence, 5.. name, value, … of the record
-- Reply 1; error FENCED
local id = ARGV[2]
local refused, instance = claim_error(id, ARGV[3]), read_instance(id)
if refused then
  return refused
end
if ARGV[4] == '1' then
  redis.call('UNLINK', keys.kv_names .. id, keys.kv .. id)
  forget_sequence(id)
  if instance then
    instance.cached_blocks = 0
    write_record(instance)
  end
end
redis.call('HSET', keys.kv_events .. id, unpack(ARGV, 5))
return 1
