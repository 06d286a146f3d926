-- Lists open calls whose owner has no lease, oldest first. Reads only calls of owners without a lease. What is no call or
-- has no time (a stranger may have written it) does not keep others from the list. A copy of a call is not that call.
-- KEYS: 1 set of owners.
-- ARGV: 1 key prefix of leases, 2 key prefix of owners' open calls, 3 key prefix of call hashes, 4 most calls to return.
-- Returns a list of calls, each as a list of fields and values.
--+forms
local limit, found = tonumber(ARGV[4]), {}
for _, owner in ipairs(run('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. owner) == 0 then
    local index = ARGV[2] .. owner
    local ids = redis.pcall('ZRANGE', index, 0, limit - 1)
    if #ids == 0 then  -- or it is no sorted set
      redis.call('SREM', KEYS[1], owner)
    end
    for _, id in ipairs(ids) do
      local held = redis.pcall('HMGET', ARGV[3] .. id, 'status', 'owner', 'opened', 'epoch', 'owner_tag', 'id')
      local may_be_claimed = held[6] == id and whole(held[4]) and whole(held[5] or '0')
      if held[1] == 'open' and held[2] == owner and may_be_claimed then
        local opened = tonumber(held[3] or 0) or 0
        found[#found + 1] = {id, opened == opened and opened or 0}  -- no NaN: it has no place in an order
      else
        redis.call('ZREM', index, id)  -- past its retention, or no call
      end
    end
  end
end
table.sort(found, function(left, right) return left[2] < right[2] end)
local calls = {}
for position = 1, math.min(limit, #found) do
  calls[position] = redis.call('HGETALL', ARGV[3] .. found[position][1])
end
return calls
