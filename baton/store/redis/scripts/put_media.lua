-- Keeps one file of an image, or keeps one that is stored for longer, within a bound on all files together.
-- KEYS: 1 the file, 2 expiries (sorted set: name -> ms), 3 bytes (hash: name -> bytes; the field '' is their sum).
-- ARGV: 1 name, 2 retention in ms, 3 bytes of the file, 4 most bytes of all files, 5 the file, or '' to ask for it,
-- 6 bytes that the file counts, with what Redis needs beside it.
-- Returns 'kept'; 'missing' if the file must be sent; or 'full', without effect on it.
-- A call sweeps at most 100 expired files, since the server does nothing else meanwhile. The rest counts until the next
-- calls have swept it.
--+forms
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local name, retention, size, counts = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[6])
local sum = whole(run('HGET', KEYS[3], '')) or 0
local function add_bytes(bytes)
  if bytes ~= 0 then
    sum = math.max(0, sum + bytes)
    redis.call('HSET', KEYS[3], '', string.format('%.0f', sum))
  end
end
local before = '(' .. string.format('%.0f', now)
for _, old in ipairs(run('ZRANGEBYSCORE', KEYS[2], '-inf', before, 'LIMIT', 0, 100)) do
  add_bytes(-(whole(redis.call('HGET', KEYS[3], old)) or 0))
  redis.call('HDEL', KEYS[3], old)
  redis.call('ZREM', KEYS[2], old)
end
local counted = whole(redis.call('HGET', KEYS[3], name)) or 0
if run('STRLEN', KEYS[1]) ~= size then
  if sum - counted + counts > tonumber(ARGV[4]) then
    return 'full'
  end
  if ARGV[5] == '' then
    return 'missing'
  end
  redis.call('SET', KEYS[1], ARGV[5])
end
-- A router with a shorter retention than another one shortens nothing.
local function extend(key)
  local ttl = math.max(redis.call('PTTL', key), retention)
  redis.call('PEXPIRE', key, ttl)
  return ttl
end
local ttl = extend(KEYS[1])
time = redis.call('TIME')  -- read behind the expiry: a file's bytes count for as long as it lives
now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[2], string.format('%.0f', now + ttl), name)
redis.call('HSET', KEYS[3], name, counts)
add_bytes(counts - counted)
extend(KEYS[2])
extend(KEYS[3])
return 'kept'
