-- Loads of some instances and their hits of one chain.
-- KEYS  1 meta; then 4 per instance: account, queue, running, kv
-- ARGV  1 test clock ms or ''; 2 chain, packed
-- Reply JSON: [epoch, tree version, sequence, now ms, one per instance: [account fields + queued, running, cached, hit]
--       | null]
-- Clock the server's, passed on so that the reader decays and measures with it
-- include: observation
return observation(KEYS[1], 2, ARGV[2])
