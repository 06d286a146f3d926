-- Opens a call once, and starts its owner's lease if there is none. Otherwise a call that is opened again after the server
-- lost everything would be an orphan until the next renewal.
-- KEYS: 1 call hash, 2 set of owners, 3 the owner's open calls (sorted set: id -> when opened, in us), 4 its lease.
-- ARGV: 1 id, 2 owner, 3 retention in ms, 4 ttl of a lease in ms, then field, value, field, value ...
-- Returns 1, or 0 when the id is taken (nothing is changed).
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
redis.call('HSET', KEYS[1], 'opened', string.format('%.0f', now_us), unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SADD', KEYS[2], ARGV[2])
redis.call('ZADD', KEYS[3], now_us, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
redis.call('SET', KEYS[4], '1', 'NX', 'PX', ARGV[4])
return 1
