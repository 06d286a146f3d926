-- Applies one event or several to a sequence: compare (attempt, state) and set, in one step.
-- KEYS: 1 sequence hash.
-- ARGV: 1 attempt of the first event, 2 events as JSON, each [attempts it opens (0 or 1), its column of the table
--       {state: next state}], 3 num_emitted, 4 failure code, 5 retention in ms, 6 fingerprint (empty: keep the stored),
--       7 owner tag, 8 attempts of an epoch.
-- Returns {outcome, state, attempt, events passed, owner tag}. Outcome: applied, or unknown, superseded, ahead or illegal
-- with the state and attempt at the refused event; then nothing is changed.
--+forms
local held = run('HMGET', KEYS[1], 'state', 'attempt', 'num_emitted', 'owner_tag')
local state, attempt, num_emitted, tag = held[1], whole(held[2]), whole(held[3]), whole(held[4] or '0')
if not (state and attempt and num_emitted and tag) then
  return {'unknown', '', 0, 0, 0}
end
local per_epoch, given, given_tag = tonumber(ARGV[8]), tonumber(ARGV[1]), tonumber(ARGV[7])
local num_passed = 0
for _, event in ipairs(cjson.decode(ARGV[2])) do
  local expected = attempt + event[1]
  if num_passed == 0 then
    local epoch, due = math.floor((given - 1) / per_epoch), math.floor((expected - 1) / per_epoch)
    if epoch < due or (epoch == due and (given_tag < tag or (given_tag == tag and given < expected))) then
      return {'superseded', state, attempt, 0, tag}
    elseif epoch ~= due or given_tag ~= tag or given ~= expected then
      return {'ahead', state, attempt, 0, tag}
    end
  end
  local target = event[2][state]
  if not target then
    return {'illegal', state, attempt, num_passed, tag}
  end
  state, attempt, num_passed = target, expected, num_passed + 1
end
redis.call('HSET', KEYS[1], 'state', state, 'attempt', attempt,
  'num_emitted', math.max(num_emitted, tonumber(ARGV[3])), 'failure_code', ARGV[4])
if ARGV[6] ~= '' then
  redis.call('HSET', KEYS[1], 'fingerprint', ARGV[6])
end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {'applied', state, attempt, num_passed, tag}
