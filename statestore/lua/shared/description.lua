-- Writes an instance's description. Numbers keep all their digits, which cjson would not.
local function write_description(id, described)
  local parts = {}
  for name, value in pairs(described) do
    local text = type(value) == 'number' and string.format('%.17g', value) or cjson.encode(value)
    parts[#parts + 1] = '"' .. name .. '":' .. text
  end
  redis.call('HSET', keys.instance .. id, 'description', '{' .. table.concat(parts, ',') .. '}')
end
