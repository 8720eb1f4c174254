-- include: account
-- include: request
-- Which held request is next. Scores are the order of first reservation; equal ones go in id order.
local function next_held(account)
  return redis.call('ZRANGE', account.queue_key, 0, 0)[1]
end

-- Dispatches held requests while the instance has room and tells their replicas; the caller's own needs no message.
-- ARGV[2] of every script that grants: the channel's name up to the replica id.
local function grant_next(requests_key, account, now_ms, caller_id)
  while has_room(account) do
    local request_id = next_held(account)
    if not request_id then
      return
    end
    local request = read_request(requests_key, request_id)
    dispatch(account, request, now_ms)
    write_request(requests_key, request)
    if request_id ~= caller_id then
      redis.call('PUBLISH', ARGV[2] .. request.replica_id, cjson.encode({
        request_id = request_id, instance_id = request.instance_id, attempt = request.attempt,
      }))
    end
  end
end
