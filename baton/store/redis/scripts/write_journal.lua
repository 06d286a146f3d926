-- Appends to the journals of many sequences. The id of an entry is `<tokens so far>-<1 at the journal's end, else 0>`, so
-- "from token n on" is "after n-0", and order is a comparison.
-- KEYS: for each entry 1 sequence hash, 2 journal (stream).
-- ARGV: 1 retention in ms, then for each entry: attempt, index of its first token, number of tokens after it,
--       1 if it ends the journal else 0, payload.
-- Returns for each entry 0 written, 1 superseded, 2 not in order. A journal keeps the tokens that it has.
-- The first write needs memory, so a full server refuses all entries together.
local function write(request, journal, attempt, first, last, ends, payload)
  local stored = redis.call('HGET', request, 'attempt')
  if not stored then
    return 2
  elseif tonumber(stored) > attempt then
    return 1
  end
  local newest = redis.call('XREVRANGE', journal, '+', '-', 'COUNT', 1)[1]
  local held, ended = 0, '0'
  if newest then
    held, ended = string.match(newest[1], '^(%d+)-(%d+)$')
    held = tonumber(held)
  end
  if first > held then
    return 2
  elseif ended == '0' and (last > held or ends == '1') then
    redis.call('XADD', journal, string.format('%d-%s', math.max(last, held), ends), 'd', payload)
    redis.call('PEXPIRE', journal, ARGV[1])
    redis.call('PEXPIRE', request, ARGV[1])
  end
  return 0
end

local outcomes = {}
for entry = 1, #KEYS / 2 do
  local at = 2 + (entry - 1) * 5
  outcomes[entry] = write(KEYS[2 * entry - 1], KEYS[2 * entry], tonumber(ARGV[at]), tonumber(ARGV[at + 1]),
    tonumber(ARGV[at + 2]), ARGV[at + 3], ARGV[at + 4])
end
return outcomes
