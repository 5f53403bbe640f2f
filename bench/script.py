"""What a decision costs Redis: its CPU for the script of meshquota, and for one as they are widely published.

Both are called alike, by EVALSHA in a pipeline, for callers by chance and at the time that it is: so levels are seldom whole.
What is compared is the server's own CPU time, in short turns, as ratios within one round.
"""

import random
import statistics
import socket
import sys
import time
from pathlib import Path

from bench import SCRIPT, arguments, cpu_seconds, encoded, run, spread
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
from local import Redis, machine  # noqa: E402

ROUNDS, CALLS, CALLERS = 15, 20_000, 10_000
# The caller's clock; everything is written back, whatever came of it.
NAIVE = """
local capacity, refill_per_ms, now, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local bucket = redis.call('HMGET', KEYS[1], 'tokens', 'ts')
local tokens, ts = tonumber(bucket[1]), tonumber(bucket[2])
if tokens == nil then
  tokens, ts = capacity, now
end
tokens = math.min(capacity, tokens + math.max(0, now - ts) * refill_per_ms)
local allowed = 0
if tokens >= cost then
  tokens, allowed = tokens - cost, 1
end
redis.call('HMSET', KEYS[1], 'tokens', tokens, 'ts', now)
redis.call('PEXPIRE', KEYS[1], math.ceil(capacity / refill_per_ms))
return {allowed, tokens}
"""
MINUTE_MS, DAY_MS = 60_000, 86_400_000


def now_ms():
    return int(time.time() * 1000)


def redis_time():
    return 0


def ours(name, capacity, period_ms, clock):
    """One token every so many milliseconds."""
    return SCRIPT, lambda caller: arguments(f"quota:{{{name}:{caller}}}:0", capacity, 1, period_ms, clock())


def naive(name, capacity, period_ms):
    return NAIVE, lambda caller: ["1", f"quota:{{{name}:{caller}}}:0", str(capacity), f"{1 / period_ms:.17f}", str(now_ms()), "1"]


# By name: the script, and the arguments for a caller. Each caller has a bucket that holds a million, or one that is empty.
CASES = {
    "naive, admitted": naive("naive", 1_000_000, MINUTE_MS),
    "meshquota, admitted, the proxy's clock": ours("ours", 1_000_000, MINUTE_MS, now_ms),
    "meshquota, admitted, Redis' clock": ours("timed", 1_000_000, MINUTE_MS, redis_time),
    "naive, denied": naive("naive:empty", 1, DAY_MS),
    "meshquota, denied, the proxy's clock": ours("ours:empty", 1, DAY_MS, now_ms),
    "meshquota, denied, Redis' clock": ours("timed:empty", 1, DAY_MS, redis_time),
}
RATIOS = [
    ("meshquota, admitted, the proxy's clock", "naive, admitted"),
    ("meshquota, admitted, Redis' clock", "naive, admitted"),
    ("meshquota, denied, the proxy's clock", "naive, denied"),
    ("meshquota, denied, Redis' clock", "naive, denied"),
]


def cost(redis, digest, call, connection, stream):
    """Microseconds of the server's CPU for a call."""
    commands = [encoded(["EVALSHA", digest, *call(random.randrange(CALLERS))]).encode() for _ in range(CALLS)]
    before = cpu_seconds(redis.process)
    for first in range(0, CALLS, 100):
        connection.sendall(b"".join(commands[first:first + 100]))
        for _ in range(100):
            redis.reply(stream)
    return (cpu_seconds(redis.process) - before) / CALLS * 1e6


def measure(folder):
    redis = folder.add(Redis(folder.path))
    digests = {source: redis.command("SCRIPT", "LOAD", source) for source in (SCRIPT, NAIVE)}
    rounds = []
    with socket.create_connection(("127.0.0.1", redis.port), timeout=30) as connection:
        with connection.makefile("rb") as stream:
            for name, (source, call) in CASES.items():
                # Every bucket is there, and those that are to be empty are.
                for caller in range(CALLERS):
                    connection.sendall(encoded(["EVALSHA", digests[source], *call(caller)]).encode())
                    redis.reply(stream)
            for number in range(ROUNDS):
                order = list(CASES.items())
                order = order[number % len(order):] + order[:number % len(order)]
                print(f"\rround {number + 1} of {ROUNDS}", end="", file=sys.stderr, flush=True)
                rounds.append({
                    name: cost(redis, digests[source], call, connection, stream)
                    for name, (source, call) in order
                })
    print(f"\r{'':<60}\r", end="", file=sys.stderr)
    keys = {name: redis.command("MEMORY", "USAGE", call(7)[1]) for name, (_, call) in CASES.items()}
    encoding = redis.command("OBJECT", "ENCODING", CASES["meshquota, admitted, Redis' clock"][1](7)[1])
    return redis.name, rounds, keys, encoding


def report(redis, rounds, keys, encoding):
    print(f"{machine()}; {redis}; {ROUNDS} rounds of {CALLS} calls each, median (quartiles)\n")
    print(f"{'':<44}{'Redis CPU us a call':>20}{'bytes a bucket':>16}")
    for name in CASES:
        print(f"{name:<44}{statistics.median(r[name] for r in rounds):>20.2f}{keys[name]:>16}")
    print("\nRedis' CPU a call, round by round")
    for name, other in RATIOS:
        print(f"{name + ' / ' + other:<74}{spread([r[name] / r[other] for r in rounds])}")
    print(f"\nA bucket is a hash, stored as {encoding}.")


if __name__ == "__main__":
    sys.exit(run(lambda folder: report(*measure(folder))))
