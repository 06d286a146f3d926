-- Enters a call under a given ballot (epoch, owner tag), unless the same or a higher one is stored. Starts its owner's
-- lease if there is none. Otherwise a call that is put again after the server lost everything would be an orphan until
-- the next renewal.
-- KEYS: 1 call hash, 2 set of owners, 3 the owner's open calls (sorted set: id -> when opened, in us), 4 its lease.
-- ARGV: 1 id, 2 owner, 3 epoch, 4 owner tag, 5 retention in ms, 6 ttl of a lease in ms,
--       7 key prefix of owners' open calls, then field, value, field, value ...
-- Returns {owner, epoch, owner tag, status} as stored afterwards.
--+forms
local epoch, tag = tonumber(ARGV[3]), tonumber(ARGV[4])
local held = run('HMGET', KEYS[1], 'owner', 'epoch', 'owner_tag', 'status', 'opened')
local held_epoch, held_tag = whole(held[2]), whole(held[3] or '0')
if held[1] and held_epoch and held_tag then
  if held_epoch > epoch or (held_epoch == epoch and held_tag >= tag) then
    return {held[1], held_epoch, held_tag, held[4] or 'open'}
  end
end
local time = redis.call('TIME')
local opened = tonumber(held[5] or '') or time[1] * 1000000 + time[2]
opened = string.format('%.0f', opened == opened and opened or 0)
redis.call('HSET', KEYS[1], 'opened', opened, unpack(ARGV, 8))  -- the first write: a full server refuses all
redis.call('PEXPIRE', KEYS[1], ARGV[5])
if held[1] then
  run('ZREM', ARGV[7] .. held[1], ARGV[1])
end
run('SADD', KEYS[2], ARGV[2])
run('ZADD', KEYS[3], opened, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('PEXPIRE', KEYS[3], ARGV[5])
redis.call('SET', KEYS[4], '0', 'NX', 'PX', ARGV[6])
return {ARGV[2], epoch, tag, 'open'}
