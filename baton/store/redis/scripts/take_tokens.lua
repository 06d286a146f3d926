-- Takes amounts from token buckets (GCRA), all or none. A bucket is the time in us at which it will be full again.
-- KEYS: the buckets.
-- ARGV: 1 us in which an empty bucket refills, 2 "1" if every amount passes, then for each bucket the us in which its
--       amount refills (negative: it is given back).
-- Returns the us to wait; 0 when the amounts are taken.
--+forms
local time = redis.call('TIME')
local now, period = time[1] * 1000000 + time[2], tonumber(ARGV[1])
local full_at, wait = {}, 0
for index, key in ipairs(KEYS) do
  local cost = tonumber(ARGV[index + 2])
  local at = math.max(now, whole(run('GET', key)) or now)
  full_at[index] = math.max(now, at + cost)
  wait = math.max(wait, full_at[index] - now - math.max(period, cost))
end
if wait > 0 and ARGV[2] ~= '1' then
  return math.ceil(wait)
end
for index, key in ipairs(KEYS) do
  if full_at[index] <= now then
    redis.call('DEL', key)
  else
    redis.call('SET', key, string.format('%.0f', full_at[index]), 'PX', math.ceil((full_at[index] - now) / 1000))
  end
end
return 0
