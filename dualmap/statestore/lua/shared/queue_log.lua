-- The log of an instance's queue, for people (scheduling/queues/queue_log.py): a stream of JSON arrays, with the latest
-- steps.
local call, format = redis.call, string.format

local function log_step(instance, step)
  call('XADD', keys.queue_log .. instance.id, 'MAXLEN', '~', terms.queue_log, '*', 'step', step)
end

-- A request was dispatched: 'granted' from the queue, or 'passed' those that are held.
local function log_dispatch(instance, kind, request, now_ms)
  local tenant = request.told.tenant or ''
  log_step(instance, format('["%s","%s",%d,%d,%d,"%s"]',
    kind, request.id, now_ms, request.enqueued_ms, request.band, tenant))
end

-- A plan of a replica, or of the leader (''), deferred a request.
local function log_deferral(instance, request, replica_id, now_ms)
  log_step(instance, format('["deferred","%s",%d,%d,%.17g,"%s"]',
    request.id, now_ms, request.uncached_tokens, instance.tokens_per_s, replica_id))
end

return { log_dispatch = log_dispatch, log_deferral = log_deferral }
