-- The head of an instance's queue, to be planned.
-- ARGV  1 clock, 2 instance id
-- Reply as of queue_head; nil where the instance is unknown
local instances = require('shared.instances')

local function read_queue(now_ms)
  local instance = instances.read(ARGV[2])
  return instance and instances.queue_head(instance, now_ms)
end

return read_queue
