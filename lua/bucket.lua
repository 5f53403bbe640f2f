-- The token bucket: reads, refills and charges one bucket for each limit, all of them or none, atomically.
--
-- KEYS[1..n]  one bucket for each limit, all different, all in one Redis Cluster slot
-- ARGV[1]     now in milliseconds; 0 = the server's own TIME
-- ARGV[2]     cost of one charge in tokens, an integer from 1
-- ARGV[3]     count: how many charges are asked for, granted as far as they fit; -n gives n charges back
-- ARGV[3i+1]  capacity of limit i in tokens
-- ARGV[3i+2]  refill of limit i: so many tokens ...
-- ARGV[3i+3]  ... every so many milliseconds, in lowest terms; capacity * period < 2^53
--
-- Reply: five integers {granted, remaining, retry_after_ms, reset_after_ms, limit}
--   granted         charges taken from every bucket (or given back), 0 to |count|
--   remaining       whole tokens left in the bucket of `limit`
--   retry_after_ms  0: all were granted; else when one more charge fits every limit; -1: never (cost > capacity)
--   reset_after_ms  when the bucket of `limit` is full
--   limit           from 0, the limit that bound: the first that can never fit; else, where a charge was refused,
--                   the one with the longest wait; else the one with the least left relative to its capacity
-- Error: WRONGTYPE where a key is no bucket. Nothing has been charged then.
--
-- A bucket is a hash {tokens, ts}: a plain decimal, and the milliseconds at which it was true. No hash: full. A
-- limiter elsewhere may write the same two fields: what it leaves out of range is clamped, a `ts` with a fraction
-- counts from the next millisecond, and one field without the other is no bucket, for a level of unknown age
-- could be neither trusted nor refilled.
--
-- Units. One token is `period` units, and one millisecond brings `refill` units, so a level is an integer below
-- 2^53. Such integers are exact in a double, and of two of them math.floor(a / b) and math.ceil(a / b) are exact
-- too, for a quotient that is not whole is too far from a whole number to be rounded to it. A sum or a product
-- that grows past 2^53 is rounded, but stays past every full bucket, to which it is cut.
--
-- A refusal writes nothing: no replication, no AOF, no later expiry, and no debt. Whoever hammers an empty bucket
-- is admitted as soon as somebody who waits.
--
-- Time never moves back: `ts` keeps the latest time that was charged at. Otherwise a clock that is behind would set
-- it back, and the next one that is right would be paid the same milliseconds again.
--
-- The capacity and the refill in force are the caller's. A lower capacity cuts the level at once; a raised one
-- lets it grow further at once, from where it is.
local floor, ceil, min, max, format = math.floor, math.ceil, math.min, math.max, string.format
local EXACT = 9007199254740991 -- 2^53 - 1
local SLACK = 1000 -- ms that a full bucket is kept, for clocks that differ a little

local now, cost, count = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end

-- Read all buckets as they are now. Nothing is written before each of them is known to be one.
local buckets, granted, never = {}, count, nil
for i = 1, #KEYS do
  local capacity, refill, period = tonumber(ARGV[3 * i + 1]), tonumber(ARGV[3 * i + 2]), tonumber(ARGV[3 * i + 3])
  local full = capacity * period
  local level, ts = full, now

  -- An error is handed on as it is: redis.call would put words before its WRONGTYPE in Redis 6.
  local state = redis.pcall('HMGET', KEYS[i], 'tokens', 'ts')
  if state.err then return state end
  local tokens, stamp = state[1], state[2]
  local exists = tokens or stamp
  if exists then
    -- The whole and the fraction are read apart, since together they may have more digits than a double.
    local whole, fraction = string.match(tokens or '', '^(%d+)(%.?%d*)$')
    if fraction == '' then
      level = whole * period
    elseif whole then
      -- 15 digits of the longest period are off by less than 0.001 units: what was written is read back exactly.
      level = whole * period + floor(('0' .. fraction) * period + 0.01)
    else
      level = tonumber(tokens)
      level = level and floor(level * period + 0.01)
    end
    ts = tonumber(stamp)
    -- NaN is the number that differs from itself.
    if not level or not ts or level ~= level or ts ~= ts then
      return redis.error_reply('WRONGTYPE the fields tokens and ts of a bucket must both be numbers')
    end
    ts = min(ceil(ts), EXACT)
    level = min(full, max(0, level) + max(0, now - ts) * refill)
    ts = max(now, ts)
  end

  local need = cost * period
  if count > 0 then
    if cost > capacity then
      never = never or i
    else
      granted = min(granted, floor(level / need))
    end
  end
  buckets[i] = {level = level, full = full, need = need, refill = refill, period = period, ts = ts, exists = exists}
end
if never then granted = 0 end

-- Write what was granted, and find the limit that bound.
local bound, longest, least = nil, 0, 2
local remaining, reset
for i = 1, #KEYS do
  local b = buckets[i]
  local level = min(b.full, b.level - granted * b.need)
  local ahead = b.ts - now -- no refill comes before `ts`
  local whole = floor(level / b.period)
  local until_full = 0
  if level < b.full then until_full = min(EXACT, ahead + ceil((b.full - level) / b.refill)) end

  -- What is given back to a bucket without a key would be above full.
  if granted > 0 or granted < 0 and b.exists then
    local tokens, rest = whole, level - whole * b.period
    if rest > 0 then
      tokens = format('%.0f', whole) .. format('%.15f', rest / b.period):sub(2):gsub('0+$', '')
    end
    redis.call('HSET', KEYS[i], 'tokens', tokens, 'ts', b.ts)
    -- Gone and full mean the same, so the key lives until it is full. A full one keeps its `ts` a little longer.
    redis.call('PEXPIRE', KEYS[i], min(EXACT, max(until_full, ahead) + SLACK))
  end

  local wait = 0
  if granted < count and level < b.need then wait = min(EXACT, ahead + ceil((b.need - level) / b.refill)) end
  local left = level / b.full
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

return {math.abs(granted), remaining, longest, reset, bound - 1}
