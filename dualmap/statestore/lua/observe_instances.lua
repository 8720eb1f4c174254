-- Loads of some instances and their hits of one chain.
-- ARGV  1 clock, 2 chain, packed, 3 blocks of it that may be hits, 4.. instance ids
-- Reply {epoch, tree version, number of this observation, now ms, record of each or nil, its hit, …}
local instances = require('shared.instances')
local kv = require('shared.kv')
local tiers = require('shared.tiers')
local tonumber = tonumber
local call = redis.call

local function observe_instances(now_ms)
  local versions = call('HMGET', keys.meta, 'epoch', 'tree_version')
  local reply = { versions[1] or 0, versions[2] or 0, call('HINCRBY', keys.meta, 'observations', 1), now_ms }
  for place = 4, #ARGV do
    local text = call('HGET', keys.instance_records, ARGV[place])
    local instance = text and instances.read(ARGV[place])
    local hit = instance and (kv.hit_blocks(instance, ARGV[2], nil, tonumber(ARGV[3]))) or 0
    reply[#reply + 1] = text
    reply[#reply + 1] = hit + (instance and instance.tiers > 0 and tiers.found_blocks(instance, ARGV[2], hit) or 0)
  end
  return reply
end

return observe_instances
