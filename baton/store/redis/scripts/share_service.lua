-- Stores the service totals of one router and returns those of all routers that stored theirs within the TTL.
-- KEYS: 1 hash: router -> time in ms, a space, its totals.
-- ARGV: 1 router, 2 its totals, 3 ttl in ms.
-- Returns a list: router, totals, router, totals, ...
--+forms
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
run('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now, ARGV[2]))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local held, live = redis.call('HGETALL', KEYS[1]), {}
for index = 1, #held, 2 do
  local stored, totals = string.match(held[index + 1], '^(%d+) (.*)$')
  if not stored or math.abs(now - tonumber(stored)) > tonumber(ARGV[3]) then  -- or a stranger's, to stay for ever
    redis.call('HDEL', KEYS[1], held[index])
  else
    live[#live + 1] = held[index]
    live[#live + 1] = totals
  end
end
return live
