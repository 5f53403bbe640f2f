"""How the cost of a request grows with the number of proxies and of buckets: a part of `make bench`.

One, two and four Envoys of one worker each ask one Redis, each for callers by chance over 16 connections of its own; as many
Envoys without the filter show what it costs them to share this machine. And one Envoy asks a Redis that holds a thousand buckets,
a hundred thousand or a million, all of them live, where every request is of a caller who has one. The cost stays flat where the
ratios of CPU stay near 1, or near those without the filter. All take short turns, and each ratio is within one round.
"""

import json
import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
from bench import (  # noqa: E402
    CALLERS, PROJECT, ROUNDS, SECONDS, Variant, answered, commands, cpu_seconds, rate, run, spread, start, with_rule,
    without_filter, wrk,
)
from local import Failure, Redis, machine  # noqa: E402

# Of each Envoy. Four have as many together as one in bench.py: more would wait for each other longer than the filter waits.
CONNECTIONS = 16
PROXIES = [1, 2, 4]
BUCKETS = [1_000, 100_000, 1_000_000]
# Buckets that are half full, and not soon full or empty: they stay where they are through the whole benchmark.
LASTING = Variant(with_rule(limits=[{"capacity": 1000000, "refill": "1/s"}]), limits=True, many_callers=True)
LIFE_MS = 500_000_000
# Buckets as the script leaves them, from one number to another.
FILL = """
for n = ARGV[1], ARGV[2] do
  local address = '10.' .. math.floor(n / 65536) .. '.' .. math.floor(n / 256) % 256 .. '.' .. n % 256
  local key = 'quota:{per-ip:' .. address .. '}:0'
  redis.call('HSET', key, 'tokens', '499999.125', 'ts', ARGV[3])
  redis.call('PEXPIRE', key, ARGV[4])
end
"""
# Their callers, by chance.
OWNERS = """
local floor, random = math.floor, math.random
math.randomseed(os.time() + os.clock() * 1000000)
function request()
  local n = random(0, {last})
  local address = "10." .. floor(n / 65536) .. "." .. floor(n / 256) % 256 .. "." .. n % 256
  return wrk.format(nil, nil, {{["x-forwarded-for"] = address}})
end
"""


class Case:
    """Envoys, the Redis that they ask, the callers, and the bytes that a bucket takes where that is known."""

    def __init__(self, envoys, redis, script, size=None):
        self.envoys, self.redis, self.script, self.size = envoys, redis, script, size

    def load(self):
        """One run: requests a second of all together, CPU microseconds a request, and for 1000 requests the calls of Redis and
        the requests that it did not decide in time."""
        before, calls, undecided = self.spent(), self.calls(), self.undecided()
        told = wrk(self.envoys, CONNECTIONS, self.script)
        envoys, redis = (after - other for after, other in zip(self.spent(), before))
        requests = sum(answered(one) for one in told)
        return {
            "rate": sum(rate(one) for one in told),
            "cpu_us": envoys / requests * 1e6,
            "redis_cpu_us": redis / requests * 1e6,
            "calls": (self.calls() - calls) / requests * 1000,
            "undecided": (self.undecided() - undecided) / requests * 1000,
        }

    def spent(self):
        return sum(cpu_seconds(envoy.process) for envoy in self.envoys), cpu_seconds(self.redis.process)

    def calls(self):
        return commands(self.redis).get("evalsha", 0)

    def undecided(self):
        metric = 'meshquota_decisions_total{rule="per-ip",outcome="fail_allow"}'
        return sum(envoy.metrics().get(metric, 0) for envoy in self.envoys)


def used_memory(redis):
    return int(re.search(r"used_memory:(\d+)", redis.command("INFO", "memory")).group(1))


def fill(redis, count):
    """Makes so many buckets. Returns the bytes that one takes."""
    now = str(int(time.time() * 1000))

    def make(first, last):
        redis.command("EVAL", FILL, "0", str(first), str(last), now, str(LIFE_MS))

    make(0, -1)  # the script's own memory
    before = used_memory(redis)
    for first in range(0, count, 1000):
        make(first, first + 999)
    return (used_memory(redis) - before) / count


def written(path, text):
    path.write_text(text)
    return path


def cases(folder):
    """Groups of cases by name. The others of a group are compared with its first."""
    return [
        proxies(folder, Variant(without_filter, many_callers=True), "no filter, Envoys: {}"),
        proxies(folder, Variant(limits=True, many_callers=True), "meshquota, Envoys: {}"),
        {f"meshquota, buckets: {count:,}": holding(folder, count) for count in BUCKETS},
    ]


def proxies(folder, variant, title):
    redis = folder.add(Redis(folder.path))
    callers = written(folder.path / "callers.lua", CALLERS)
    envoys = [start(folder, redis, variant, None) for _ in range(max(PROXIES))]
    return {title.format(count): Case(envoys[:count], redis, callers) for count in PROXIES}


def holding(folder, count):
    redis = folder.add(Redis(folder.path))
    size = fill(redis, count)
    owners = written(folder.path / f"owners-{count}.lua", OWNERS.format(last=count - 1))
    return Case([start(folder, redis, LASTING, None)], redis, owners, size)


def measure(folder):
    groups = cases(folder)
    order = [(name, case) for group in groups for name, case in group.items()]
    rounds = []
    for number in range(ROUNDS):
        # The order changes, as in bench.py.
        turn = number % len(order)
        print(f"\rround {number + 1} of {ROUNDS}", end="", file=sys.stderr, flush=True)
        rounds.append({name: case.load() for name, case in order[turn:] + order[:turn]})
    print(f"\r{'':<66}\r", end="", file=sys.stderr)
    for count, case in zip(BUCKETS, groups[-1].values()):
        # That of the first request, which was no caller's, is soon full and may be gone.
        if case.redis.command("DBSIZE") - count not in (0, 1):
            raise Failure(f"callers came who had none of the {count} buckets, or some are gone")
    return groups, rounds


# The columns of the table: a heading, a field, and its format.
COLUMNS = [
    ("requests/s", "rate", ".0f"),
    ("Envoy CPU us", "cpu_us", ".1f"),
    ("Redis CPU us", "redis_cpu_us", ".1f"),
    ("calls/1000", "calls", ".1f"),
    ("undecided/1000", "undecided", ".1f"),
]


def report(groups, rounds):
    redis = next(iter(groups[0].values())).redis.name
    print(f"{machine()}; Envoy 1.40.0, one worker each; {redis}; {ROUNDS} rounds of {SECONDS} s, medians")
    print(f"At {CONNECTIONS} connections to each Envoy; requests/s of all together; CPU a request; calls are those of Redis for 1000 requests.\n")
    print(f"{'':<32}" + "".join(f"{heading:>16}" for heading, _, _ in COLUMNS) + f"{'bytes a bucket':>16}")
    for group in groups:
        for name, case in group.items():
            cells = (format(statistics.median(one[name][field] for one in rounds), form) for _, field, form in COLUMNS)
            size = f"{case.size:.0f}" if case.size else ""
            print(f"{name:<32}" + "".join(f"{cell:>16}" for cell in cells) + f"{size:>16}")
    for title, field in (("requests/s", "rate"), ("Envoy's CPU a request", "cpu_us"), ("Redis' CPU a request", "redis_cpu_us")):
        print(f"\n{title}, round by round: median (quartiles)")
        for first, *others in groups:
            for name in others:
                if not first.startswith("no filter") or field != "redis_cpu_us":
                    print(f"{name + ' / ' + first:<62}{spread([one[name][field] / one[first][field] for one in rounds])}")
    sizes = {name: case.size for name, case in groups[-1].items()}
    found = {"machine": machine(), "redis": redis, "rounds": rounds, "bytes_a_bucket": sizes}
    (PROJECT / "target/scale.json").write_text(json.dumps(found, indent=1))
    print("\nEvery run is in target/scale.json.")


if __name__ == "__main__":
    sys.exit(run(lambda folder: report(*measure(folder))))
