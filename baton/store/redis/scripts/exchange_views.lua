-- Lists one router, stores or removes its view, and returns those of the others if it watches.
-- KEYS: 1 hash: router -> time of its last call, a space, end of its watching, in ms; 2 hash: router -> its view.
-- ARGV: 1 router, 2 its view or '', 3 1 if it watches, 4 ms for which a router is listed, 5 ms of watching,
--       6 most bytes of a view, 7 most routers.
-- Returns 1 if another router watches, else 0; then for each other one: router, ms since its last call, its view
-- ('' for none and if this one does not watch, one byte for a view that is too long).
--+forms
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local until_ms = ARGV[3] == '1' and now + tonumber(ARGV[5]) or 0
run('HSET', KEYS[1], ARGV[1], string.format('%.0f %.0f', now, until_ms))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
if ARGV[2] == '' then
  run('HDEL', KEYS[2], ARGV[1])
else
  run('HSET', KEYS[2], ARGV[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
local watched, found, count = 0, {0}, 0
local listed = redis.call('HGETALL', KEYS[1])
for index = 1, #listed, 2 do
  local router = listed[index]
  local called, watching = string.match(listed[index + 1], '^(%d+) (%d+)$')
  if not called or math.abs(now - tonumber(called)) > tonumber(ARGV[4]) then  -- or a stranger's, to stay for ever
    redis.call('HDEL', KEYS[1], router)
    redis.call('HDEL', KEYS[2], router)
  elseif router ~= ARGV[1] then
    if tonumber(watching) > now then
      watched = 1
    end
    if count < tonumber(ARGV[7]) then
      count = count + 1
      local view = ''
      local size = ARGV[3] == '1' and redis.call('HSTRLEN', KEYS[2], router) or 0
      if size > tonumber(ARGV[6]) then
        view = '?'
      elseif size > 0 then
        view = redis.call('HGET', KEYS[2], router)
      end
      found[#found + 1] = router
      found[#found + 1] = string.format('%.0f', math.max(0, now - tonumber(called)))
      found[#found + 1] = view
    end
  end
end
found[1] = string.format('%.0f', watched)
return found
