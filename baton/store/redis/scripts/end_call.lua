-- Marks a call ended or abandoned, unless the store has a higher ballot. A lower one is of before a claim that the store
-- has lost: the end brings its ballot along. Enters the end of a call that is lost.
-- KEYS: 1 call hash.
-- ARGV: 1 id, 2 epoch, 3 owner tag, 4 status, 5 retention in ms, 6 key prefix of owners' open calls,
--       7 trace (empty: keep the stored), 8 retention of the end of a lost call in ms, 9 ids of sequences that have ended
--       as JSON, 10 key prefix of sequence hashes, 11 terminal states as JSON {state: true}, then fields and values of
--       the end of a lost call (none: do not enter it).
-- Returns 1, or 0 when nothing is changed, or the id of a sequence that is live here (nothing is changed then either).
--+forms
local held = run('HMGET', KEYS[1], 'epoch', 'owner_tag', 'owner')
local held_epoch, held_tag = whole(held[1]), whole(held[2] or '0')
if not (held_epoch and held_tag) then
  if not ARGV[12] then
    return 0
  end
  redis.call('HSET', KEYS[1], unpack(ARGV, 12))
  redis.call('PEXPIRE', KEYS[1], ARGV[8])
  return 1
end
local epoch, tag = tonumber(ARGV[2]), tonumber(ARGV[3])
if held_epoch > epoch or (held_epoch == epoch and held_tag > tag) then
  return 0
end
local terminal = cjson.decode(ARGV[11])
for _, sequence in ipairs(cjson.decode(ARGV[9])) do
  local state = run('HGET', ARGV[10] .. sequence, 'state')
  if state and not terminal[state] then
    return sequence
  end
end
-- A full server checks memory only at the first write of a script: this one needs none.
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('HSET', KEYS[1], 'status', ARGV[4], 'epoch', ARGV[2], 'owner_tag', ARGV[3])
run('ZREM', ARGV[6] .. (held[3] or ''), ARGV[1])
if ARGV[7] ~= '' then
  redis.call('HSET', KEYS[1], 'trace', ARGV[7])
end
return 1
