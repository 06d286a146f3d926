-- Creates or refreshes a worker, unless another incarnation holds its id or a newer one has been announced.
-- A live record is never displaced: who announces in time keeps the id.
-- Incarnations are random: their order is that of arrival, the current one last in the sorted set.
-- They are compared as strings: a Lua number cannot hold 64 bits.
-- KEYS: 1 worker hash, 2 its incarnations (sorted set), 3 index of workers (sorted set: id -> expiry in ms).
-- ARGV: 1 id, 2 incarnation, 3 status, 4 record, 5 ttl in ms, 6 retention in ms, 7 most incarnations remembered,
--       8 channel of changes, 9 links and budgets, as text: a change of them is published.
-- Returns 1. Changes nothing and returns 0 when this incarnation has been replaced, -1 when another one holds the id.
--+forms
local newest = run('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if newest[1] ~= ARGV[2] and redis.call('ZSCORE', KEYS[2], ARGV[2]) then
  return 0
end
local held = run('HMGET', KEYS[1], 'incarnation', 'status', 'facts')
if held[1] and held[1] ~= ARGV[2] then
  return -1
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
-- A full server checks memory only at the first write of a script: this one needs none.
run('ZREMRANGEBYSCORE', KEYS[3], '-inf', now_ms)
if newest[1] ~= ARGV[2] then
  redis.call('ZADD', KEYS[2], tonumber(newest[2] or 0) + 1, ARGV[2])
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -tonumber(ARGV[7]) - 1)
end
redis.call('PEXPIRE', KEYS[2], ARGV[6])

redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'status', ARGV[3], 'record', ARGV[4], 'facts', ARGV[9])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('ZADD', KEYS[3], now_ms + tonumber(ARGV[5]), ARGV[1])

if held[1] ~= ARGV[2] or held[2] ~= ARGV[3] or held[3] ~= ARGV[9] then
  redis.call('PUBLISH', ARGV[8], ARGV[1])
end
return 1
