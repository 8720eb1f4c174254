-- ARGV[2] of every script that may grant: the pool's terms, '<queue order> <max hold ms> <grants channel>', the channel
-- up to the replica's id.
local queue_order, max_hold_ms, grants_channel = string.match(ARGV[2], '^(%l+) (%d+) (.+)$')
max_hold_ms = tonumber(max_hold_ms)
local by_deadline = queue_order == 'deadline'
