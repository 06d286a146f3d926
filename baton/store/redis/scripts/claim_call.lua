-- Gives a call to a new owner under the next epoch. Resumes each of its sequences that the table allows, under the first
-- attempt of that epoch.
-- KEYS: 1 call hash, 2 set of owners.
-- ARGV: 1 id, 2 required epoch, 3 new owner, 4 its router, 5 retention in ms, 6 key prefix of owners' open calls,
--       7 key prefix of sequence hashes, 8 RESUME column of the table as JSON {state: next state},
--       9 first attempt of the next epoch, 10 fields and values of a missing sequence, but its id, as a JSON list.
-- Returns the fields and values of the call after the claim; nothing, without effect, when it is unknown, has another
-- epoch or has ended.
local held = redis.call('HMGET', KEYS[1], 'epoch', 'status', 'owner', 'opened', 'sequence_ids')
if not held[1] or tonumber(held[1]) ~= tonumber(ARGV[2]) or held[2] == 'ended' then
  return {}
end
-- A full server checks memory only at the first write of a script: this one needs none.
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('ZREM', ARGV[6] .. held[3], ARGV[1])
redis.call('HSET', KEYS[1], 'owner', ARGV[3], 'epoch', tonumber(held[1]) + 1, 'status', 'open')
redis.call('SADD', KEYS[2], ARGV[3])
redis.call('ZADD', ARGV[6] .. ARGV[3], held[4], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('PEXPIRE', ARGV[6] .. ARGV[3], ARGV[5])

local column, placeholder = cjson.decode(ARGV[8]), cjson.decode(ARGV[10])
for _, sequence in ipairs(cjson.decode(held[5])) do
  local key = ARGV[7] .. sequence
  local request = redis.call('HMGET', key, 'state', 'attempt')
  local target = request[1] and column[request[1]]
  if not request[1] then
    redis.call('HSET', key, unpack(placeholder))
    redis.call('HSET', key, 'id', sequence)
    redis.call('PEXPIRE', key, ARGV[5])
  elseif target then
    local attempt = math.max(tonumber(request[2]) + 1, tonumber(ARGV[9]))
    redis.call('HSET', key, 'state', target, 'attempt', attempt, 'failure_code', '', 'router_id', ARGV[4])
    redis.call('PEXPIRE', key, ARGV[5])
  end
end
return redis.call('HGETALL', KEYS[1])
