-- Twin of statestore/ledger/horizon.py: which instances were last given a marked prefix. Marks are packed: 8 bytes
-- each, shallowest first. Two generations: what is not stamped again while one fills up is forgotten.
local HOLDERS_PER_MARK = 2
local MARKS_PER_CALL = 500
local MARK_TOKENS = 1024

local function mark_at(marks, place)
  return string.sub(marks, place * 8 - 7, place * 8)
end

-- Depth in blocks of a place among COUNT marks, 0 for place 0; twin of mark_depths in scheduling/prefix_holders.py.
local function mark_depth(place, count, blocks, prompt_tokens, block_tokens)
  if place > 0 and place == count then
    return math.min(blocks, math.floor(prompt_tokens / block_tokens))
  end
  return place * math.max(1, math.floor(MARK_TOKENS / block_tokens))
end

local function held_by(new_key, old_key, mark)
  return redis.call('HGET', new_key, mark) or redis.call('HGET', old_key, mark)
end

-- The holders' ids in one text, the latest first.
local function with_holder(held, instance_id)
  local ids = { instance_id }
  for other in string.gmatch(held or '', '%S+') do
    if other ~= instance_id and #ids < HOLDERS_PER_MARK then
      ids[#ids + 1] = other
    end
  end
  return table.concat(ids, ' ')
end

local function stamp_holders(new_key, old_key, marks, max_marks, instance_id)
  local count = #marks / 8
  for first = 1, count, MARKS_PER_CALL do
    local names, pairs_ = {}, {}
    for place = first, math.min(first + MARKS_PER_CALL - 1, count) do
      names[#names + 1] = mark_at(marks, place)
    end
    local known = redis.call('HMGET', new_key, unpack(names))
    for index, name in ipairs(names) do
      pairs_[#pairs_ + 1] = name
      pairs_[#pairs_ + 1] = with_holder(known[index] or redis.call('HGET', old_key, name), instance_id)
    end
    redis.call('HSET', new_key, unpack(pairs_))
  end
  if count > 0 and redis.call('HLEN', new_key) > max_marks then
    redis.call('RENAME', new_key, old_key)
  end
end

-- The ready holders of the deepest known mark and the mark's place, or {} and 0.
local function find_holders(new_key, old_key, lightest_key, marks)
  local count = #marks / 8
  if count == 0 then
    return {}, 0
  end
  local place, held = count, held_by(new_key, old_key, mark_at(marks, count))
  -- The last mark stands at no multiple of the stride, so shorter prompts say nothing about it: it is asked first.
  -- Those before it are closed under prefixes.
  local low, high = 0, held and 0 or count - 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    local found = held_by(new_key, old_key, mark_at(marks, middle + 1))
    if found then
      low, place, held = middle + 1, middle + 1, found
    else
      high = middle
    end
  end
  local holders = {}
  for instance_id in string.gmatch(held or '', '%S+') do
    if redis.call('ZSCORE', lightest_key, instance_id) then
      holders[#holders + 1] = instance_id
    end
  end
  return holders, #holders > 0 and place or 0
end
