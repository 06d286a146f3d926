-- Gives a call to a new owner under a higher epoch than those of the call, its sequences and a floor. Resumes each of its
-- sequences that the table allows, under the first attempt of that epoch. May enter a call that is missing.
-- KEYS: 1 call hash, 2 set of owners.
-- ARGV: 1 id, 2 required epoch, 3 required owner tag (both 0: the call is missing), 4 new owner, 5 its tag, 6 its router,
--       7 floor, 8 retention in ms, 9 key prefix of owners' open calls, 10 key prefix of sequence hashes,
--       11 RESUME column of the table as JSON {state: next state}, 12 attempts of an epoch,
--       13 fields and values of a missing sequence, but its id and attempt, as a JSON list,
--       14 ids of a missing call's sequences as JSON, then its fields and values (none: do not enter it).
-- Returns the fields and values of the call after the claim; nothing, without effect, when it has another ballot or has
-- ended, or is missing and may not be entered.
--+forms
local held = run('HMGET', KEYS[1], 'epoch', 'owner_tag', 'status', 'owner', 'opened', 'sequence_ids')
if whole(held[1] or '0') ~= tonumber(ARGV[2]) or whole(held[2] or '0') ~= tonumber(ARGV[3]) then
  return {}
elseif held[3] == 'ended' or not (held[1] or ARGV[15]) then
  return {}
end

local per_epoch = tonumber(ARGV[12])
local epoch = math.max(tonumber(held[1] or 0), tonumber(ARGV[7]))
local readable, sequences = pcall(cjson.decode, held[6] or ARGV[14])
if not readable or type(sequences) ~= 'table' or #sequences > 1024 then
  return {}  -- a stranger wrote them; this call must not keep the owner from the claims of others
end
local requests = {}
for _, sequence in ipairs(sequences) do
  if type(sequence) ~= 'string' then
    return {}
  end
  local request = run('HMGET', ARGV[10] .. sequence, 'state', 'attempt')
  requests[#requests + 1] = {sequence, request[1]}
  if request[1] then
    epoch = math.max(epoch, math.floor(((whole(request[2]) or 1) - 1) / per_epoch) + 1)
  end
end
epoch = epoch + 1

-- A full server checks memory only at the first write of a script: the claim of a stored call needs none.
local time = redis.call('TIME')
local opened = tonumber(held[5] or '') or time[1] * 1000000 + time[2]
opened = string.format('%.0f', opened == opened and opened or 0)
if held[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[8])
  run('ZREM', ARGV[9] .. (held[4] or ''), ARGV[1])
else
  redis.call('HSET', KEYS[1], 'opened', opened, unpack(ARGV, 15))
  redis.call('PEXPIRE', KEYS[1], ARGV[8])
end
redis.call('HSET', KEYS[1], 'owner', ARGV[4], 'epoch', epoch, 'owner_tag', ARGV[5], 'status', 'open')
run('SADD', KEYS[2], ARGV[4])
run('ZADD', ARGV[9] .. ARGV[4], opened, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[8])
redis.call('PEXPIRE', ARGV[9] .. ARGV[4], ARGV[8])

local column, attempt = cjson.decode(ARGV[11]), (epoch - 1) * per_epoch + 1
for _, request in ipairs(requests) do
  local key, state = ARGV[10] .. request[1], request[2]
  if not state then
    redis.call('HSET', key, unpack(cjson.decode(ARGV[13])))
    redis.call('HSET', key, 'id', request[1], 'attempt', attempt, 'owner_tag', ARGV[5])
    redis.call('PEXPIRE', key, ARGV[8])
  elseif column[state] then
    redis.call('HSET', key, 'state', column[state], 'attempt', attempt, 'owner_tag', ARGV[5], 'failure_code', '',
      'router_id', ARGV[6])
    redis.call('PEXPIRE', key, ARGV[8])
  end
end
return redis.call('HGETALL', KEYS[1])
