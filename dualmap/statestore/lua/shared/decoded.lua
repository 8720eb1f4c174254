local pcall, type = pcall, type
local decode = cjson.decode

-- A table from a text of JSON; nil where there is no text, or no such one, as somebody wrote it by hand.
local function decoded(text)
  if not text then
    return nil
  end
  local is_readable, found = pcall(decode, text)
  return is_readable and type(found) == 'table' and found or nil
end

return decoded
