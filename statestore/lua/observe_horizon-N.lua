-- Loads of some instances and their hits of one chain, and what is known beyond them.
-- KEYS  1 meta, 2 lightest, 3 holders of the new generation, 4 of the old; then 4 per instance: account, queue,
--       running, kv
-- ARGV  1 test clock ms or ''; 2 chain, packed; 3 marks of the chain, packed
-- Reply JSON: [[holder id, …], place of their mark from 1 on or 0, [[id, score], …], as observe_instances]
-- Clock the server's, passed on so that the reader decays and measures with it
-- include: observation
-- include: horizon
local holders, place, lightest = read_horizon(KEYS[3], KEYS[4], KEYS[2], ARGV[3])
return json_list({ holders, place, lightest, observation(KEYS[1], 5, ARGV[2]) })
