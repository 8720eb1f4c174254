-- What the scripts of dualmap/statestore/lua find beside Lua 5.1: what a server gives them, and the keys and constants
-- for which dualmap/statestore/pool/scripts.py writes values.
std = "lua51"
read_globals = { "ARGV", "KEYS", "cjson", "keys", "redis", "struct", "terms" }
