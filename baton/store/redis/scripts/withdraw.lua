-- Removes a worker if the record is of this incarnation.
-- KEYS: 1 worker hash, 2 index of workers.  ARGV: 1 id, 2 incarnation, 3 channel of changes.
-- Returns 1 if something was removed, else 0.
--+forms
if run('HGET', KEYS[1], 'incarnation') ~= ARGV[2] then
  return 0
end
redis.call('DEL', KEYS[1])
run('ZREM', KEYS[2], ARGV[1])
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
