-- Runs chains of writes: each by the rules of its own script, and only if the one before it in its chain was accepted.
-- KEYS and ARGV: 1 the writes as a JSON list, each [script, number of its chain, number of its keys, number of its
--       arguments], then the keys and the arguments of all writes, in order.
-- Returns for each write {1, reply} accepted, {0, reply} refused, or {} if it did not run.
-- An error stops all: the writes before it have taken effect. A full server refuses the first write that needs memory.
local scripts, accepts = {}, {}
-- The next lines are replaced by the scripts of these names (`script_files.script_source`).
--@put_call
--@put_request
--@advance_sequence
--@write_journal
--@end_call

function accepts.put_call(reply, args)
  return reply[2] == tonumber(args[3]) and reply[3] == tonumber(args[4])
end

function accepts.put_request(reply)
  return type(reply) == 'number'
end

function accepts.advance_sequence(reply)
  return reply[1] == 'applied'
end

function accepts.write_journal(reply)
  for _, outcome in ipairs(reply) do
    if outcome ~= 0 then
      return false
    end
  end
  return true
end

function accepts.end_call(reply)
  return reply == 1
end

local function slice(values, first, length)
  local part = {}
  for position = 1, length do
    part[position] = values[first + position - 1]
  end
  return part
end

local answers, next_key, next_arg, refused = {}, 1, 2, 0
for position, write in ipairs(cjson.decode(ARGV[1])) do
  local script, chain, num_keys, num_args = write[1], write[2], write[3], write[4]
  if chain == refused then
    answers[position] = {}
  else
    local args = slice(ARGV, next_arg, num_args)
    local reply = scripts[script](slice(KEYS, next_key, num_keys), args)
    local accepted = accepts[script](reply, args)
    answers[position] = {accepted and 1 or 0, reply}
    if not accepted then
      refused = chain
    end
  end
  next_key, next_arg = next_key + num_keys, next_arg + num_args
end
return answers
