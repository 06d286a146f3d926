-- Keeps one file of an image, or keeps one that is stored for longer, within a bound on all files together.
-- KEYS: 1 the file, 2 expiries (sorted set: name -> ms), 3 bytes (hash: name -> bytes; the field '' is their sum).
-- ARGV: 1 name, 2 retention in ms, 3 bytes of the file, 4 most bytes of all files, 5 the file, or '' to ask for it.
-- Returns 'kept'; 'missing' if the file must be sent; or 'full', without effect on it.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local name, retention, size = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. string.format('%.0f', now))) do
  redis.call('HINCRBY', KEYS[3], '', -tonumber(redis.call('HGET', KEYS[3], old) or 0))
  redis.call('HDEL', KEYS[3], old)
  redis.call('ZREM', KEYS[2], old)
end
local counted = tonumber(redis.call('HGET', KEYS[3], name) or 0)
if redis.call('STRLEN', KEYS[1]) ~= size then
  local sum = tonumber(redis.call('HGET', KEYS[3], '') or 0)
  if sum - counted + size > tonumber(ARGV[4]) then
    return 'full'
  end
  if ARGV[5] == '' then
    return 'missing'
  end
  redis.call('SET', KEYS[1], ARGV[5])
end
redis.call('PEXPIRE', KEYS[1], retention)
redis.call('ZADD', KEYS[2], string.format('%.0f', now + retention), name)
redis.call('HSET', KEYS[3], name, size)
redis.call('HINCRBY', KEYS[3], '', size - counted)
redis.call('PEXPIRE', KEYS[2], retention)
redis.call('PEXPIRE', KEYS[3], retention)
return 'kept'
