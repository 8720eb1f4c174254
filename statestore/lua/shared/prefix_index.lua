-- include: terms
-- Which instance was last given a sampled prefix: its id by prefix hash. Samples are listed shallowest first. Two
-- generations: what is not stamped again while one fills is forgotten.
local function stamp_samples(new_key, old_key, samples, instance_id)
  local fields = {}
  for place, sample in ipairs(samples) do
    fields[2 * place - 1], fields[2 * place] = sample, instance_id
  end
  if fields[1] and redis.call('HSET', new_key, unpack(fields)) > 0 and redis.call('HLEN', new_key) > terms.samples then
    redis.call('RENAME', new_key, old_key)
  end
end

-- The instance of the deepest known sample, and its place; nil and 0 where none is known.
local function find_holder(new_key, old_key, samples)
  local newer = samples[1] and redis.call('HMGET', new_key, unpack(samples))
  local older = samples[1] and redis.call('HMGET', old_key, unpack(samples))
  for place = #samples, 1, -1 do
    if newer[place] or older[place] then
      return newer[place] or older[place], place
    end
  end
  return nil, 0
end
