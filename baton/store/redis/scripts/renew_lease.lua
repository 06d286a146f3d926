-- Renews an owner's lease, or starts it.
-- KEYS: 1 lease.  ARGV: 1 ttl in ms.
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then
  redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
end
return 1
