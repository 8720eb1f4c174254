local ipairs, unpack = ipairs, unpack
local call = redis.call

-- Which instance was last given a sampled prefix: its id by prefix hash. Samples are listed shallowest first. Two
-- generations: what is not stamped again while one fills is forgotten.
local function stamp_samples(samples, instance_id)
  local fields = {}
  for place, sample in ipairs(samples) do
    fields[2 * place - 1], fields[2 * place] = sample, instance_id
  end
  if fields[1] and call('HSET', keys.prefixes_new, unpack(fields)) > 0
    and call('HLEN', keys.prefixes_new) > terms.max_prefixes then
    call('RENAME', keys.prefixes_new, keys.prefixes_old)
  end
end

-- The instance of the deepest known sample, and its place; nil where none is known.
local function find_holder(samples)
  local newer = samples[1] and call('HMGET', keys.prefixes_new, unpack(samples))
  local older = samples[1] and not newer[#samples] and call('HMGET', keys.prefixes_old, unpack(samples)) or {}
  for place = #samples, 1, -1 do
    if newer[place] or older[place] then
      return newer[place] or older[place], place
    end
  end
end

return { stamp_samples = stamp_samples, find_holder = find_holder }
