-- Metering (scheduling/request/metering.py): a log has what each request of a tenant used, and a hash for each day in UTC has
-- the sums by account.

-- The last day that was named: when it began, its name, and the number of its month since the year 0.
local LAST_DAY = {}

-- Names the day of a time in ms: days since 0000-03-01, in eras of 400 years (H. Hinnant, "chrono-compatible low-level date
-- algorithms").
local function name_day(at_ms)
  local past_ms = at_ms - (LAST_DAY.begins_ms or at_ms + 1)
  if past_ms >= 0 and past_ms < 86400000 then
    return
  end
  local number = math.floor(at_ms / 86400000)
  local era = math.floor((number + 719468) / 146097)
  local of_era = number + 719468 - era * 146097
  local year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524) - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - 365 * year - math.floor(year / 4) + math.floor(year / 100)
  local month = math.floor((5 * of_year + 2) / 153)
  local day = of_year - math.floor((153 * month + 2) / 5) + 1
  month = month < 10 and month + 3 or month - 9
  year = year + era * 400 + (month < 3 and 1 or 0)
  LAST_DAY.begins_ms, LAST_DAY.month = number * 86400000, year * 12 + month
  LAST_DAY.name = string.format('%04d-%02d-%02d', year, month, day)
end

-- The day of a time in ms, as '2027-01-15'.
local function utc_day(at_ms)
  name_day(at_ms)
  return LAST_DAY.name
end

-- The number of its month since the year 0.
local function utc_month(at_ms)
  name_day(at_ms)
  return LAST_DAY.month
end

-- A call keeps the counts that it meters, packed, by account, these accounts in order, and the records of the log, until its end.
local account_counts, accounts, usage_records = {}, nil, nil

-- The counts of one request that was refused.
local REFUSED = terms.refused

-- Two texts of packed counts as one.
local function counts_together(one, other)
  local requests, prompt, cached, output, unanswered, lost, refused = struct.unpack('<ddddddd', one)
  local more, their_prompt, their_cached, their_output, their_unanswered, their_lost, their_refused = struct.unpack('<ddddddd', other)
  return struct.pack('<ddddddd', requests + more, prompt + their_prompt, cached + their_cached, output + their_output,
    unanswered + their_unanswered, lost + their_lost, refused + their_refused)
end

-- Adds counts to those of an account today.
local function add_usage(account, counts)
  local former = account_counts[account]
  if former then
    account_counts[account] = counts_together(former, counts)
    return
  end
  account_counts[account] = counts
  accounts = accounts or {}
  accounts[#accounts + 1] = account
end

-- Remembers how a request of a dead replica was metered: should that come back with it, it is taken back (UsageBooks.taken_back).
local function remember_lost(request, used, at_ms)
  if redis.call('HLEN', keys.usage_lost) >= terms.usage_lost then
    redis.call('DEL', keys.usage_lost)
  end
  redis.call('HSET', keys.usage_lost, request.id,
    string.format('%s %s %s %s', request.told.replica_id, utc_day(at_ms), used, request.told.account))
end

-- Meters a request that is over: its counts, packed, and the beginning of its record in the log.
local function meter(request, counts, used)
  local account = request.told.account
  usage_records = usage_records or {}
  usage_records[#usage_records + 1] = used .. ' ' .. request.id .. ' ' .. account
  add_usage(account, counts)
end

-- The counts of an account that were written: packed behind a byte of 0, or as text by an older version. Counts that cannot be read are
-- lost.
local function counts_from(text)
  if text and #text == 57 and string.byte(text) == 0 then
    return string.sub(text, 2)
  end
  local requests, prompt, cached, output, unanswered, lost, refused = string.match(text or '', terms.counts)
  return requests and struct.pack('<ddddddd', requests, prompt, cached, output, unanswered, lost, refused)
end

-- Writes what this call metered, at its end.
local function write_usage(at_ms)
  if usage_records then
    local at = string.format('%d ', at_ms)
    for _, record in ipairs(usage_records) do
      redis.call('XADD', keys.usage_log, 'MAXLEN', '~', terms.usage_log, '*', 'record', at .. record)
    end
  end
  if not accounts then
    return
  end
  local key, written = keys.usage .. utc_day(at_ms), {}
  for place, text in ipairs(redis.call('HMGET', key, unpack(accounts))) do
    local account, former = accounts[place], counts_from(text)
    local counts = account_counts[account]
    written[2 * place - 1] = account
    written[2 * place] = '\0' .. (former and counts_together(former, counts) or counts)
  end
  redis.call('HSET', key, unpack(written))
end
