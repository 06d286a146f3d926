-- Enters a sequence again, unless the store has a higher attempt, or the same one and it has ended. Without an owner tag
-- the router's name tells owners apart.
-- KEYS: 1 sequence hash.
-- ARGV: 1 retention in ms, 2 attempt, 3 owner tag, 4 attempts of an epoch, 5 router, 6 num_emitted,
--       7 terminal states as JSON {state: true}, then field, value, field, value ...
-- Returns `num_emitted` as stored now, or the fields and values that are stored instead (nothing is changed then).
--+forms
local attempt, tag, per_epoch = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local held = run('HMGET', KEYS[1], 'attempt', 'owner_tag', 'state', 'num_emitted', 'router_id')
local num_emitted = tonumber(ARGV[6])
local held_attempt, held_tag = whole(held[1]), whole(held[2] or '0')
if held_attempt and held_tag then
  local epoch, held_epoch = math.floor((attempt - 1) / per_epoch), math.floor((held_attempt - 1) / per_epoch)
  local is_same = held_attempt == attempt and held_tag == tag
  local is_lower = held_epoch < epoch
    or (held_epoch == epoch and (held_tag < tag or (held_tag == tag and held_attempt < attempt)))
  if is_same and (tag ~= 0 or held[5] == ARGV[5]) and not cjson.decode(ARGV[7])[held[3]] then
    num_emitted = math.max(num_emitted, whole(held[4]) or 0)
  elseif not is_lower then
    return redis.call('HGETALL', KEYS[1])
  end
end
redis.call('HSET', KEYS[1], unpack(ARGV, 8))
redis.call('HSET', KEYS[1], 'num_emitted', num_emitted)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return num_emitted
