-- Twin of scheduling/load_window.py: prefill work assigned lately, decayed with a time constant of 180 s.
local WINDOW_MS = 180000

local function add_to_window(account, now_ms, tokens)
  local age_ms = math.max(0, now_ms - account.window_ms)
  account.window_tokens = account.window_tokens * math.exp(-age_ms / WINDOW_MS) + tokens
  account.window_ms = now_ms
end
