-- The token bucket: reads, refills and charges one bucket for each limit, all of them or none, atomically.
--
-- KEYS[1..n]  one bucket for each limit, all different, all in one Redis Cluster slot
-- ARGV[3i-2]  capacity of limit i in tokens
-- ARGV[3i-1]  refill of limit i: so many tokens ...
-- ARGV[3i]    ... every so many milliseconds, in lowest terms; capacity * period < 2^53
-- What follows is left out, from the end, where it is usual:
-- ARGV[3n+1]  now in milliseconds; 0, as usual = the server's own TIME
-- ARGV[3n+2]  cost of one charge in tokens, an integer from 1, which is usual
-- ARGV[3n+3]  count: how many charges are asked for, granted as far as they fit, usually 1; -n gives n charges back;
--             0 takes nothing, and is answered like a refusal where one charge would not fit
--
-- Reply: integers {granted, remaining, retry_after_ms, reset_after_ms, limit}
--   granted         charges taken from every bucket (or given back), 0 to |count|
--   remaining       whole tokens left in the bucket of `limit`
--   retry_after_ms  0: all were granted; else when one more charge fits every limit; -1: never (cost > capacity)
--   reset_after_ms  when the bucket of `limit` is full
--   limit           from 0, which is left out, the limit that bound: the first that can never fit; else, where a charge
--                   was refused, the one with the longest wait; else the one with the least left relative to its capacity
-- Error: WRONGTYPE where a key is no bucket. Nothing has been charged then.
--
-- A bucket is a hash {tokens, ts}: a plain decimal, and the milliseconds at which it was true. No hash: full. A
-- limiter elsewhere may write the same two fields: what it leaves out of range is clamped, a `ts` with a fraction
-- counts from the next millisecond, and one field without the other is no bucket, for a level of unknown age
-- could be neither trusted nor refilled.
--
-- Units. One token is `period` units, and one millisecond brings `refill` units, so a level is an integer below
-- 2^53. Such integers are exact in a double, and so is what is left of a division of two of them (a % b), which is how
-- a quotient is rounded here: (a - a % b) / b is exact. A sum or a product that grows past 2^53 is rounded, but stays
-- past every full bucket, to which it is cut.
--
-- What costs here, next to the calls of Redis, are arguments, tables and calls of functions: numbers are read by adding 0,
-- compared in place, and not kept in a table where there is one limit.
--
-- A refusal writes nothing: no replication, no AOF, no later expiry, and no debt. Whoever hammers an empty bucket
-- is admitted as soon as somebody who waits.
--
-- Time never moves back: `ts` keeps the latest time that was charged at. Otherwise a clock that is behind would set
-- it back, and the next one that is right would be paid the same milliseconds again.
--
-- The capacity and the refill in force are the caller's. A lower capacity cuts the level at once; a raised one
-- lets it grow further at once, from where it is.
local EXACT = 9007199254740991 -- 2^53 - 1
local SHORT = 2^44 -- up to here a product of what was read is off by less than 0.004
local SLACK = 1000 -- ms that a full bucket is kept, for clocks that differ a little

local KEYS, ARGV = KEYS, ARGV
local limits = #KEYS
local now, cost, count = ARGV[3 * limits + 1] or 0, ARGV[3 * limits + 2] or 1, ARGV[3 * limits + 3] or 1
now, cost, count = now + 0, cost + 0, count + 0
if now == 0 then
  local time = redis.call('TIME')
  local seconds, us = time[1] + 0, time[2] + 0
  now = seconds * 1000 + (us - us % 1000) / 1000
end

-- A limit, and its bucket as it is now. The only one stays in these variables; of several, each waits in `all`.
local capacity, refill, period, full, need, level, ts, exists
local all = limits > 1 and {}

-- Read all buckets. Nothing is written before each of them is known to be one.
local granted, never = count, nil
for i = 1, limits do
  capacity, refill, period = ARGV[3 * i - 2] + 0, ARGV[3 * i - 1] + 0, ARGV[3 * i] + 0
  full, need = capacity * period, cost * period
  level, ts = full, now

  -- An error is handed on as it is: redis.call would put words before its WRONGTYPE in Redis 6.
  local state = redis.pcall('HMGET', KEYS[i], 'tokens', 'ts')
  if state.err then return state end
  local tokens, stamp = state[1], state[2]
  exists = tokens or stamp
  if exists then
    level, ts = tonumber(tokens), tonumber(stamp)
    -- NaN is the number that differs from itself.
    if not level or not ts or level ~= level or ts ~= ts then
      return redis.error_reply('WRONGTYPE the fields tokens and ts of a bucket must both be numbers')
    end
    if level < 0 then level = 0 end
    if level > EXACT then level = EXACT end
    local units = level * period
    if level % 1 > 0 then
      -- The whole and the fraction are read apart where they may have more digits than a double. 15 digits of the longest
      -- period are off by less than 0.001 units, and a product this small by less still: what was written is read back exactly.
      local whole, fraction
      if units > SHORT then whole, fraction = string.match(tokens, '^(%d+)(%.%d+)$') end
      if whole then
        whole, units = whole * period, fraction * period
      else
        whole = 0
      end
      units = units + 0.01
      units = whole + (units - units % 1)
    end
    level = units
    if ts > EXACT then ts = EXACT end
    if ts % 1 > 0 then ts = ts - ts % 1 + 1 end
    if now > ts then
      level = level + (now - ts) * refill
      ts = now
    end
    if level > full then level = full end
  end

  if count >= 0 then
    if cost > capacity then
      never = never or i
    elseif level < granted * need then
      granted = (level - level % need) / need
    end
  end
  if all then all[i] = {refill, period, full, need, level, ts, exists} end
end
if never then granted = 0 end

-- Write what was granted, and find the limit that bound.
local bound, longest, least = nil, 0, 2
local wanted = count == 0 and 1 or count
local remaining, reset
for i = 1, limits do
  if all then refill, period, full, need, level, ts, exists = unpack(all[i], 1, 7) end
  level = level - granted * need
  if level > full then level = full end
  local ahead = ts - now -- no refill comes before `ts`
  local rest = level % period
  local whole = (level - rest) / period
  local until_full = 0
  if level < full then
    local missing = full - level
    local short = missing % refill
    until_full = ahead + (missing - short) / refill
    if short > 0 then until_full = until_full + 1 end
    if until_full > EXACT then until_full = EXACT end
  end

  -- What is given back to a bucket without a key would be above full.
  if granted > 0 or granted < 0 and exists then
    local tokens = whole
    if rest > 0 then
      -- 15 digits of a fraction, without the zeros at their end.
      tokens = string.match(string.format('%d.%015d', whole, rest / period * 1e15), '.*[1-9]')
    end
    redis.call('HSET', KEYS[i], 'tokens', tokens, 'ts', ts)
    -- Gone and full mean the same, so the key lives until it is full. A full one keeps its `ts` a little longer.
    local life = until_full
    if life < ahead then life = ahead end
    life = life + SLACK
    if life > EXACT then life = EXACT end
    redis.call('PEXPIRE', KEYS[i], life)
  end

  local wait = 0
  if granted < wanted and level < need then
    local missing = need - level
    local short = missing % refill
    wait = ahead + (missing - short) / refill
    if short > 0 then wait = wait + 1 end
    if wait > EXACT then wait = EXACT end
  end
  local left = level / full
  local binds
  if never then
    binds = i == never
  else
    binds = wait > longest or longest == 0 and left < least
  end
  if binds then
    bound, longest, least, remaining, reset = i, wait, left, whole, until_full
  end
end
if never then longest = -1 end
if granted < 0 then granted = -granted end

if bound > 1 then return {granted, remaining, longest, reset, bound - 1} end
return {granted, remaining, longest, reset}
