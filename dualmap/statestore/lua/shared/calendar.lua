-- Days and months in UTC, by which quotas and metering count.
local floor, format = math.floor, string.format

-- The last day that was named: when it began, its name, and the number of its month since the year 0.
local last_day = {}

-- Names the day of a time in ms: days since 0000-03-01, in eras of 400 years (H. Hinnant, "chrono-compatible low-level
-- date algorithms").
local function name_day(at_ms)
  local past_ms = at_ms - (last_day.begins_ms or at_ms + 1)
  if past_ms >= 0 and past_ms < 86400000 then
    return
  end
  local number = floor(at_ms / 86400000)
  local era = floor((number + 719468) / 146097)
  local of_era = number + 719468 - era * 146097
  local year = floor((of_era - floor(of_era / 1460) + floor(of_era / 36524) - floor(of_era / 146096)) / 365)
  local of_year = of_era - 365 * year - floor(year / 4) + floor(year / 100)
  local month = floor((5 * of_year + 2) / 153)
  local day = of_year - floor((153 * month + 2) / 5) + 1
  month = month < 10 and month + 3 or month - 9
  year = year + era * 400 + (month < 3 and 1 or 0)
  last_day.begins_ms, last_day.month = number * 86400000, year * 12 + month
  last_day.name = format('%04d-%02d-%02d', year, month, day)
end

-- The day of a time in ms, as '2027-01-15'.
local function utc_day(at_ms)
  name_day(at_ms)
  return last_day.name
end

-- The number of its month since the year 0.
local function utc_month(at_ms)
  name_day(at_ms)
  return last_day.month
end

return { utc_day = utc_day, utc_month = utc_month }
