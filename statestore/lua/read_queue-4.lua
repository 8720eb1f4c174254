-- One instance and the head of its queue.
-- KEYS  1-4 instance
-- ARGV  1 clock
-- Reply queue (queue_json), or 'null' without an instance
-- include: clock, instance
return redis.call('EXISTS', KEYS[1]) == 1 and queue_json(1, store_now_ms()) or 'null'
