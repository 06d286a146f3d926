-- Marks a call ended or abandoned, unless a newer owner has claimed it.
-- KEYS: 1 call hash.
-- ARGV: 1 id, 2 epoch, 3 status, 4 retention in ms, 5 key prefix of owners' open calls, 6 trace (empty: keep the stored).
-- Returns 1, or 0 when the call is unknown or has a newer epoch (nothing is changed).
local held = redis.call('HMGET', KEYS[1], 'epoch', 'owner')
if not held[1] or tonumber(held[1]) > tonumber(ARGV[2]) then
  return 0
end
-- A full server checks memory only at the first write of a script: this one needs none.
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('HSET', KEYS[1], 'status', ARGV[3])
redis.call('ZREM', ARGV[5] .. held[2], ARGV[1])
if ARGV[6] ~= '' then
  redis.call('HSET', KEYS[1], 'trace', ARGV[6])
end
return 1
