-- Renews an owner's lease, or starts it. Its value is the number of the last renewal.
-- KEYS: 1 lease, 2 generation of the store.
-- ARGV: 1 ttl in ms, 2 number of this renewal, 3 generation of a store that has none, 4 retention in ms.
-- Returns {generation, number of the last renewal (0: the lease had ended), id of the server's process ('': it may not
-- be asked)}.
--+forms
redis.call('PEXPIRE', KEYS[1], ARGV[1])  -- the first write needs no memory: a full server renews leases
local before = whole(run('GET', KEYS[1])) or 0
redis.call('SET', KEYS[1], string.format('%.0f', math.max(before, tonumber(ARGV[2]))), 'PX', ARGV[1])
redis.call('SET', KEYS[2], ARGV[3], 'NX')
local generation = run('GET', KEYS[2])
if not generation or #generation > 64 or not string.match(generation, '^%w+$') then
  generation = ARGV[3]
  redis.call('SET', KEYS[2], generation)  -- a stranger's was there
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
local info = redis.pcall('INFO', 'server')
local server = type(info) == 'string' and string.match(info, 'run_id:(%w+)') or ''
return {generation, before, server}
