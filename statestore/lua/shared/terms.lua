-- ARGV[2] of every script that may grant: the pool's terms, '<queue order> <max hold ms> <max late work ms> <late work
-- share> <KV weight s> <grants channel>', the channel up to the replica's id.
local queue_order, max_hold_ms, max_late_work_ms, late_work_share, kv_weight_s, grants_channel =
  string.match(ARGV[2], '^(%l+) (%d+) (%d+) (%S+) (%S+) (.+)$')
max_hold_ms = tonumber(max_hold_ms)
max_late_work_ms = tonumber(max_late_work_ms)
late_work_share = tonumber(late_work_share)
kv_weight_s = tonumber(kv_weight_s)
local by_deadline = queue_order == 'deadline'
