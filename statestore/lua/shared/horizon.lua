-- include: holders
-- include: json_list
-- What is known beyond the instances that are asked for; twin of statestore/ledger/horizon.py.
local LIGHTEST = 2

-- The holders' ids as JSON, the place of their mark from 1 on or 0, the lightest with their scores as JSON.
local function read_horizon(new_key, old_key, ranking_key, marks)
  local holders, place = find_holders(new_key, old_key, ranking_key, marks)
  for index, instance_id in ipairs(holders) do
    holders[index] = cjson.encode(instance_id)
  end
  local ranking, lightest = redis.call('ZRANGE', ranking_key, 0, LIGHTEST - 1, 'WITHSCORES'), {}
  for index = 1, #ranking, 2 do
    lightest[#lightest + 1] = json_list({ cjson.encode(ranking[index]), ranking[index + 1] })
  end
  return json_list(holders), place, json_list(lightest)
end
