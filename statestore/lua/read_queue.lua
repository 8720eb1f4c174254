-- One instance and the head of its queue.
-- ARGV  1 clock, 2 instance id
-- Reply queue (queue_head), or nil without an instance
local instance = read_instance(ARGV[2])
return instance and queue_head(instance, store_now_ms())
