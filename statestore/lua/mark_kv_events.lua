-- Changes how the KV metadata of an instance follow its events, gives the instance back, or hands it to another subscriber.
-- ARGV  1 clock, 2 instance id, 3 fence, 4 '1' to forget metadata, names and sequence, 5.. name, value, … of the record
-- Reply 1, or 0 if the instance is unknown; error FENCED
local id = ARGV[2]
local refused, instance = claim_error(id, ARGV[3]), read_instance(id)
if refused or not instance then
  return refused or 0
elseif ARGV[4] == '1' then
  redis.call('UNLINK', keys.kv_names .. id, keys.kv .. id)
  forget_sequence(id)
  instance.cached_blocks = 0
  write_record(instance)
end
redis.call('HSET', keys.kv_events .. id, unpack(ARGV, 5))
return 1
