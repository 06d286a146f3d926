-- Creates a sequence once.
-- KEYS: 1 sequence hash.  ARGV: 1 retention in ms, then field, value, field, value ...
-- Returns 1, or 0 when the id is taken (nothing is changed).
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
