-- Texts that are JSON each, as one JSON list. cjson would write an empty table as an object, and drop digits of numbers.
local function json_list(items)
  return '[' .. table.concat(items, ',') .. ']'
end
