-- Metering (scheduling/request/metering.py): a log has what each request of a tenant used, and a hash for each day in UTC has
-- the sums by account.

-- Names of days that this script has made.
local days = {}

-- The day of a time in ms, as '2027-01-15': days since 0000-03-01, in eras of 400 years (H. Hinnant, "chrono-compatible low-level
-- date algorithms").
local function utc_day(at_ms)
  local number = math.floor(at_ms / 86400000)
  if days[number] then
    return days[number]
  end
  local era = math.floor((number + 719468) / 146097)
  local of_era = number + 719468 - era * 146097
  local year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524) - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - 365 * year - math.floor(year / 4) + math.floor(year / 100)
  local month = math.floor((5 * of_year + 2) / 153)
  local day = of_year - math.floor((153 * month + 2) / 5) + 1
  month = month < 10 and month + 3 or month - 9
  days[number] = string.format('%04d-%02d-%02d', year + era * 400 + (month < 3 and 1 or 0), month, day)
  return days[number]
end

-- A call keeps the counts that it meters, by account, these accounts in order, and the records of the log, until its end.
local account_counts, accounts, usage_records = {}, {}, {}

-- The seven counts that a text begins with, as texts; nothing where it has none.
local function counts_of(text)
  return string.match(text or '', terms.counts)
end

-- Adds counts to those of an account; the first of them is nil where there are none.
local function add_counts(account, requests, prompt, cached, output, unanswered, lost, refused)
  local sums = account_counts[account]
  if requests and sums then
    sums[1], sums[2], sums[3], sums[4] = sums[1] + requests, sums[2] + prompt, sums[3] + cached, sums[4] + output
    sums[5], sums[6], sums[7] = sums[5] + unanswered, sums[6] + lost, sums[7] + refused
  elseif requests then
    account_counts[account], accounts[#accounts + 1] = { requests, prompt, cached, output, unanswered, lost, refused }, account
  end
end

-- Adds to the counts of an account today, where 'used' begins with figures for all of them.
local function add_usage(account, used)
  add_counts(account, counts_of(used))
end

-- Remembers how a request of a dead replica was metered: should that come back with it, it is taken back (UsageBooks.taken_back).
local function remember_lost(request, used, at_ms)
  if redis.call('HLEN', keys.usage_lost) >= terms.usage_lost then
    redis.call('DEL', keys.usage_lost)
  end
  redis.call('HSET', keys.usage_lost, request.id,
    string.format('%s %s %s %s', request.told.replica_id, utc_day(at_ms), used, request.told.account))
end

-- Meters a request that is over.
local function meter(request, used)
  local account = request.told.account
  usage_records[#usage_records + 1] = used .. ' ' .. request.id .. ' ' .. account
  add_usage(account, used)
end

-- Writes what this call metered, at its end. Former counts that cannot be read are lost.
local function write_usage(at_ms)
  if not accounts[1] and not usage_records[1] then
    return
  end
  local at = string.format('%d ', at_ms)
  for _, record in ipairs(usage_records) do
    redis.call('XADD', keys.usage_log, 'MAXLEN', '~', terms.usage_log, '*', 'record', at .. record)
  end
  if not accounts[1] then
    return
  end
  local key, texts = keys.usage .. utc_day(at_ms), {}
  for place, former in ipairs(redis.call('HMGET', key, unpack(accounts))) do
    add_counts(accounts[place], counts_of(former))
    texts[2 * place - 1], texts[2 * place] = accounts[place],
      string.format('%d %d %d %d %d %d %d', unpack(account_counts[accounts[place]]))
  end
  redis.call('HSET', key, unpack(texts))
end
