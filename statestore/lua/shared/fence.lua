-- include: lease
-- Refuses the writes of a deposed leader: nil, or the error reply to return.
local function fence_error(leader_key, fence, now_ms)
  local lease = redis.call('HMGET', leader_key, 'fence', 'expires_ms', 'lease_ms')
  if lease[1] == fence and lease_runs(lease[2], lease[3], now_ms) then
    return nil
  end
  return redis.error_reply('FENCED fence ' .. fence .. ' is no longer the leader\'s: stop leading and change nothing more')
end
