-- Loads of some instances and their hits of one chain, with all that their tiers have of it.
-- ARGV  1 clock, 2 chain, packed, 3 its block size, 4 tokens of the prompt, 5.. instance ids
-- Reply {epoch, tree version, number of this observation, now ms, what tiers have, as a placement replies it
--       (place_requests.lua), or nil, record of each or nil, its hit, …}
local instances = require('shared.instances')
local kv = require('shared.kv')
local tiers = require('shared.tiers')
local tonumber = tonumber
local call = redis.call

local function observe_instances(now_ms)
  local chain, block_tokens, prompt_tokens, loaded = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), nil
  local versions = call('HMGET', keys.meta, 'epoch', 'tree_version')
  local reply = { versions[1] or 0, versions[2] or 0, call('HINCRBY', keys.meta, 'observations', 1), now_ms, false }
  for place = 5, #ARGV do
    local text = call('HGET', keys.instance_records, ARGV[place])
    local instance = text and instances.read(ARGV[place])
    local hit = instance and (kv.hit_blocks(instance, chain, nil, kv.most_blocks(prompt_tokens, block_tokens))) or 0
    local load = instance and instance.tiers > 0
      and tiers.whole_load(instance, chain, block_tokens, prompt_tokens, hit)
    if load then
      loaded = loaded or {}
      loaded[instance.id], hit = load, hit + load.blocks
    end
    reply[#reply + 1] = text
    reply[#reply + 1] = hit
  end
  reply[5] = loaded and tiers.text_of(loaded) or false
  return reply
end

return observe_instances
