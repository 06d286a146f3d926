-- Appends to the journals of many sequences. The id of an entry is `<tokens so far>-<1 at the journal's end, else 0>`, so
-- "from token n on" is "after n-0", and order is a comparison.
-- KEYS: for each entry 1 sequence hash, 2 journal (stream).
-- ARGV: 1 retention in ms, 2 attempts of an epoch, 3 RESUME column of the table as JSON {state: next state}, then for
--       each entry: attempt, owner tag, index of its first token, number of tokens after it, 1 if it ends the journal
--       else 0, payload.
-- Returns for each entry 0 written, 1 superseded, 2 not in order. A journal keeps the tokens that it has. A higher attempt
-- than the stored one becomes the stored one; a higher epoch or tag comes from an owner whose claim the store has lost,
-- and resumes the sequence as that claim did.
-- The first write needs memory, so a full server refuses all entries together.
--+forms
local per_epoch = tonumber(ARGV[2])
local column = cjson.decode(ARGV[3])

local function write(request, journal, attempt, tag, first, last, ends, payload)
  local stored = run('HMGET', request, 'attempt', 'owner_tag', 'state')
  local held_attempt, held_tag = whole(stored[1]), whole(stored[2] or '0')
  if not (held_attempt and held_tag) then
    return 2
  end
  local epoch, held_epoch = math.floor((attempt - 1) / per_epoch), math.floor((held_attempt - 1) / per_epoch)
  if held_epoch > epoch or (held_epoch == epoch and (held_tag > tag or (held_tag == tag and held_attempt > attempt))) then
    return 1
  end
  local newest = run('XREVRANGE', journal, '+', '-', 'COUNT', 1)[1]
  local held, ended = 0, '0'
  if newest then
    held, ended = string.match(newest[1], '^(%d+)-(%d+)$')
    held = whole(held) or 0
  end
  if first > held then
    return 2
  end
  if held_attempt ~= attempt or held_tag ~= tag then
    redis.call('HSET', request, 'attempt', attempt, 'owner_tag', tag)
    if (held_epoch ~= epoch or held_tag ~= tag) and column[stored[3]] then
      redis.call('HSET', request, 'state', column[stored[3]], 'failure_code', '')
    end
    redis.call('PEXPIRE', request, ARGV[1])
  end
  if ended == '0' and (last > held or ends == '1') then
    local added = redis.pcall('XADD', journal, string.format('%d-%s', math.max(last, held), ends), 'd', payload)
    if type(added) == 'table' and added.err then
      if not string.find(added.err, 'stream', 1, true) then
        error(added.err, 0)
      end
      redis.call('DEL', journal)  -- a stranger has spent its ids
      return 2
    end
    redis.call('PEXPIRE', journal, ARGV[1])
    redis.call('PEXPIRE', request, ARGV[1])
  end
  return 0
end

local outcomes = {}
for entry = 1, #KEYS / 2 do
  local at = 4 + (entry - 1) * 6
  outcomes[entry] = write(KEYS[2 * entry - 1], KEYS[2 * entry], tonumber(ARGV[at]), tonumber(ARGV[at + 1]),
    tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), ARGV[at + 4], ARGV[at + 5])
end
return outcomes
