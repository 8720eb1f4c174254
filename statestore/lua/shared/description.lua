-- Writes the description of an instance, or what else is known about it. Numbers keep all their digits, which cjson would not.
local function write_fields(id, text, fields)
  local parts = {}
  for name, value in pairs(fields) do
    local told = type(value) == 'number' and string.format('%.17g', value) or cjson.encode(value)
    parts[#parts + 1] = '"' .. name .. '":' .. told
  end
  redis.call('HSET', keys.instance .. id, text, '{' .. table.concat(parts, ',') .. '}')
end
