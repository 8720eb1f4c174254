-- The head of an instance's queue, to be planned.
-- ARGV  1 clock, 2 instance id
-- Reply as of queue_head; nil where the instance is unknown
local instance = read_instance(ARGV[2])
return instance and queue_head(instance, now_ms)
