-- Loads of some instances and their hits of one chain, and what is known beyond them.
-- KEYS  1 meta, 2 lightest, 3 holders of the new generation, 4 of the old; then 4 per instance: account, queue,
--       running, kv
-- ARGV  1 test clock ms or ''; 2 chain, packed; 3 marks of the chain, packed
-- Reply JSON: [[holder id, …], place of their mark from 1 on or 0, [[id, score], …], as observe_instances]
-- Clock the server's, passed on so that the reader decays and measures with it
-- include: observation
-- include: holders
local LIGHTEST = 2
local holders, place = find_holders(KEYS[3], KEYS[4], KEYS[2], ARGV[3])
for index, instance_id in ipairs(holders) do
  holders[index] = cjson.encode(instance_id)
end
local ranking, lightest = redis.call('ZRANGE', KEYS[2], 0, LIGHTEST - 1, 'WITHSCORES'), {}
for index = 1, #ranking, 2 do
  lightest[#lightest + 1] = json_list({ cjson.encode(ranking[index]), ranking[index + 1] })
end
return json_list({ json_list(holders), place, json_list(lightest), observation(KEYS[1], 5, ARGV[2]) })
