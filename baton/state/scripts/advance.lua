-- Moves a request along the table: compare (attempt, state) and set, in one step.
-- KEYS: 1 request hash.
-- ARGV: 1 attempt, 2 how many attempts the event opens (0 or 1), 3 the event's column of the table as JSON
--       {state: next state}, 4 num_emitted, 5 failure code, 6 retention in ms.
-- Returns {outcome, stored state, stored attempt}; outcome is moved, unknown, superseded, ahead or illegal.
local held = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'num_emitted')
local state, attempt, num_emitted = held[1], tonumber(held[2]), tonumber(held[3])
if not state then
  return {'unknown', '', 0}
end
local given, expected = tonumber(ARGV[1]), attempt + tonumber(ARGV[2])
if given < expected then
  return {'superseded', state, attempt}
elseif given > expected then
  return {'ahead', state, attempt}
end
local target = cjson.decode(ARGV[3])[state]
if not target then
  return {'illegal', state, attempt}
end
redis.call('HSET', KEYS[1], 'state', target, 'attempt', given,
  'num_emitted', math.max(num_emitted, tonumber(ARGV[4])), 'failure_code', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return {'moved', target, given}
