-- include: account
-- include: terms
-- Twin of scheduling/overdue_work.py: work done for overdue requests lately, a bucket that empties slowly.

local function overdue_work_ms(account, now_ms)
  return math.max(0, account.overdue_work_ms - math.max(0, now_ms - account.overdue_at_ms) * late_work_share)
end

-- Rare, so that it writes its fields itself.
local function add_overdue_work(account, work_ms, now_ms)
  account.overdue_work_ms, account.overdue_at_ms = overdue_work_ms(account, now_ms) + work_ms, now_ms
  redis.call('HSET', account.key, 'overdue_work_ms', exact(account.overdue_work_ms), 'overdue_at_ms', now_ms)
end
