-- Reads what a stranger may have written. Included in scripts. A key of another type is removed and counts as missing, as
-- if the stranger had deleted it: it must not make a script fail, which would hinder others.

-- Runs a command on a key, its second argument. Raises the errors that do not come from the key's type.
local function run(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then
    return reply
  end
  if string.find(reply.err, 'WRONGTYPE', 1, true) then
    redis.call('DEL', (select(2, ...)))
  end
  return redis.call(...)
end

-- Returns the number of a text of decimal digits, exact in a double; nil for any other text, or none.
local function whole(text)
  local number = text and #text <= 16 and string.match(text, '^%d+$') and tonumber(text)
  return number and number <= 9007199254740992 and number or nil
end
