-- Whether any of the fields in ARGV from FIRST on (name, value, name, value, …) differs from the account's.
local function differs(account_key, first)
  for field = first, #ARGV, 2 do
    if redis.call('HGET', account_key, ARGV[field]) ~= ARGV[field + 1] then
      return true
    end
  end
  return false
end
