-- Observes one or two candidates, and reserves the one that leaves nothing to weigh if there is one: it is dispatched.
-- KEYS  1 meta, 2 requests, 3 replicas, 4 arrivals, 5 holders of the new generation, 6 of the old; then 5 per candidate:
--       account, queue, running, kv, late; then chains of held requests, lightest
-- ARGV  1 test clock ms or '', 2 terms, 3 chain, packed, 4 marks of the chain, packed, 5 request id, 6 replica id,
--       7 prompt tokens, 8 block tokens, 9 expected output tokens, 10 SLO ms,
--       11 weights of recompute and eviction, 12 arrival log entries, 13 arrival head bytes,
--       14 marks of a generation at most; then the candidates' ids
-- Reply JSON: [null | [place of the candidate from 0 on, its hit, uncached tokens, expected TTFT s, its features,
--       null | [place of the other, its uncached tokens]], as observe_horizon]
-- Clock the server's, passed on so that the reader decays and measures with it
-- include: idle_holder
-- include: observation
-- include: horizon
-- include: placing
local FIRST_CANDIDATE, KEYS_EACH, FIRST_ID = 7, 5, 15
local now_ms, chain, marks = store_now_ms(), ARGV[3], ARGV[4]

local function read_candidates()
  local candidates = {}
  for first = FIRST_CANDIDATE, #KEYS - 2, KEYS_EACH do
    local index = #candidates
    candidates[index + 1] = {
      index = index, first = first, id = ARGV[FIRST_ID + index], stored = stored_load(first),
      hit = hit_blocks(KEYS[first + 3], chain),
    }
  end
  return candidates
end

local function newcomer()
  return {
    request_id = ARGV[5], replica_id = ARGV[6], state = 'held', attempt = 1, prompt_tokens = tonumber(ARGV[7]),
    block_tokens = tonumber(ARGV[8]), expected_output_tokens = tonumber(ARGV[9]), slo_ms = tonumber(ARGV[10]),
    enqueued_ms = now_ms, dispatched_ms = 0, prefilled_ms = 0, alternative_uncached_tokens = 0,
  }
end

-- The JSON of what was reserved, or 'null' where the instance cannot take the request right now.
local function reserve(request, chosen, features, ttft_s, other)
  request.instance_id, request.uncached_tokens, request.ttft_features = chosen.id, chosen.uncached_tokens, features
  if other then
    request.alternative_id, request.alternative_uncached_tokens = other.id, other.uncached_tokens
  end
  local account = read_account(chosen.first, chosen.id)
  if not takes_requests(account) or not may_go_unlisted(account, request, chain, now_ms) then
    return 'null'
  end
  local books = {
    meta_key = KEYS[1], requests_key = KEYS[2], replicas_key = KEYS[3], arrivals_key = KEYS[4], new_holders_key = KEYS[5],
    old_holders_key = KEYS[6], chain = chain, marks = marks, arrivals = ARGV[12], head_bytes = tonumber(ARGV[13]),
    max_marks = tonumber(ARGV[14]),
  }
  arrive(books, request, now_ms)
  take_place(books, account, request, chosen.uncached_tokens, true, now_ms)
  write_account(account)
  return json_list({
    chosen.index, chosen.hit, chosen.uncached_tokens, exact(ttft_s), json_list(features),
    other and json_list({ other.index, other.uncached_tokens }) or 'null',
  })
end

local candidates = read_candidates()
local seen = begin_observation(KEYS[1], now_ms)
for _, candidate in ipairs(candidates) do
  seen[#seen + 1] = load_json(candidate.stored, candidate.hit)
end
local holders, mark, lightest = read_horizon(KEYS[5], KEYS[6], KEYS[#KEYS], marks)
local request, reserved = newcomer(), 'null'
local holder_blocks = mark_depth(mark, #marks / 8, #chain / 8, request.prompt_tokens, request.block_tokens)
local chosen, features, ttft_s, other = idle_holder(candidates, request, ARGV[11], holder_blocks)
if chosen and redis.call('HEXISTS', KEYS[2], request.request_id) == 0 then
  reserved = reserve(request, chosen, features, ttft_s, other)
end
return json_list({ reserved, json_list({ holders, mark, lightest, json_list(seen) }) })
