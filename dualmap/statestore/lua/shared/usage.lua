-- Metering (scheduling/request/metering.py): a log has what each request of a tenant used, and a hash for each day in
-- UTC has the sums by account.
local calendar = require('shared.calendar')
local utc_day = calendar.utc_day
local ipairs, unpack = ipairs, unpack
local call, byte, format, match, sub = redis.call, string.byte, string.format, string.match, string.sub
local pack, unpack_from = struct.pack, struct.unpack

-- The counts of one request that was refused.
local REFUSED = terms.refused

-- Until its end (write_usage) a call keeps the counts that it meters, packed, by account, these accounts in order, and
-- the records of the log.
local account_counts, accounts, usage_records

-- Two texts of packed counts as one.
local function counts_together(one, other)
  local requests, prompt, cached, output, unanswered, lost, refused = unpack_from('<ddddddd', one)
  local more, prompt_more, cached_more, output_more, unanswered_more, lost_more, refused_more
    = unpack_from('<ddddddd', other)
  return pack('<ddddddd', requests + more, prompt + prompt_more, cached + cached_more, output + output_more,
    unanswered + unanswered_more, lost + lost_more, refused + refused_more)
end

-- Adds counts to those of an account today.
local function add_usage(account, counts)
  if not accounts then
    account_counts, accounts = { [account] = counts }, { account }
    return
  end
  local former = account_counts[account]
  if former then
    account_counts[account] = counts_together(former, counts)
  else
    account_counts[account], accounts[#accounts + 1] = counts, account
  end
end

-- Remembers how a request of a dead replica was metered: should that come back with it, it is taken back
-- (UsageBooks.taken_back).
local function remember_lost(request, used, at_ms)
  if call('HLEN', keys.usage_lost) >= terms.usage_lost then
    call('DEL', keys.usage_lost)
  end
  call('HSET', keys.usage_lost, request.id,
    format('%s %s %s %s', request.told.replica_id, utc_day(at_ms), used, request.told.account))
end

-- Meters a request that is over: its counts, packed, and the beginning of its record in the log.
local function meter(request, counts, used)
  local account = request.told.account
  usage_records = usage_records or {}
  usage_records[#usage_records + 1] = used .. ' ' .. request.id .. ' ' .. account
  add_usage(account, counts)
end

-- The counts of an account that were written: packed behind a byte of 0, or as text by an older version. Counts that
-- cannot be read are lost.
local function counts_from(text)
  if text and #text == 57 and byte(text) == 0 then
    return sub(text, 2)
  end
  local requests, prompt, cached, output, unanswered, lost, refused = match(text or '', terms.counts)
  return requests and pack('<ddddddd', requests, prompt, cached, output, unanswered, lost, refused)
end

-- Writes what this call metered, at its end.
local function write_usage(at_ms)
  if usage_records then
    local at = format('%d ', at_ms)
    for _, record in ipairs(usage_records) do
      call('XADD', keys.usage_log, 'MAXLEN', '~', terms.usage_log, '*', 'record', at .. record)
    end
    usage_records = nil
  end
  if not accounts then
    return
  end
  local key, written = keys.usage .. utc_day(at_ms), {}
  for place, text in ipairs(call('HMGET', key, unpack(accounts))) do
    local account, former = accounts[place], counts_from(text)
    local counts = account_counts[account]
    written[2 * place - 1] = account
    written[2 * place] = '\0' .. (former and counts_together(former, counts) or counts)
  end
  call('HSET', key, unpack(written))
  account_counts, accounts = nil, nil
end

return {
  REFUSED = REFUSED,
  add_usage = add_usage,
  remember_lost = remember_lost,
  meter = meter,
  write_usage = write_usage,
}
