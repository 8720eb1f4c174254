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

-- Adds to the counts of an account today, where 'used' begins with figures for all of them. What cannot be read is lost.
local function add_usage(account, used, at_ms)
  local key = keys.usage .. utc_day(at_ms)
  local requests, prompt, cached, output, unanswered, lost, refused = string.match(used, terms.counts)
  local former = redis.call('HGET', key, account)
  if former then
    local a, b, c, d, e, f, g = string.match(former, terms.counts)
    if a then
      requests, prompt, cached, output = requests + a, prompt + b, cached + c, output + d
      unanswered, lost, refused = unanswered + e, lost + f, refused + g
    end
  end
  redis.call('HSET', key, account, string.format('%d %d %d %d %d %d %d', requests, prompt, cached, output, unanswered, lost, refused))
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
local function meter(request, used, at_ms)
  local account = request.told.account
  redis.call('XADD', keys.usage_log, 'MAXLEN', '~', terms.usage_log, '*', 'record',
    string.format('%d %s %s %s', at_ms, used, request.id, account))
  add_usage(account, used, at_ms)
end
