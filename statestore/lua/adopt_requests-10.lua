-- Enters live requests of one instance that the store may have lost, as they are; known ones stay. Whether a held
-- one is late is asked anew.
-- KEYS  1 meta, 2 requests, 3 replicas, 4-8 account, queue, running, kv, late of the instance, 9 chains of held
--       requests, 10 lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 instance id, 4.. requests as JSON, one each
-- Reply how many were entered
-- Clock the server's
-- include: clock
-- include: grants
-- include: replicas
local now_ms = store_now_ms()
local account = read_account(4, ARGV[3])
if not account then
  return 0
end
local adopted = 0
for index = 4, #ARGV do
  local request = cjson.decode(ARGV[index])
  if redis.call('HEXISTS', KEYS[2], request.request_id) == 0 then
    if request.sequence > tonumber(redis.call('HGET', KEYS[1], 'request_sequence') or 0) then
      redis.call('HSET', KEYS[1], 'request_sequence', request.sequence)
    end
    meet_replica(KEYS[3], request.replica_id, now_ms)
    forget_chain(request.request_id) -- left behind by whoever deleted the request by hand
    enter_anew(account, request, now_ms)
    write_request(KEYS[2], request)
    grant_next(KEYS[2], account, now_ms)
    adopted = adopted + 1
  end
end
write_account(account)
return adopted
