"""What an outage of Redis costs, and what memory the filter takes under load: a part of `make bench`.

First, paced requests over an Envoy with the filter and one without it, in turn, while Redis is frozen and goes on again:
what is shown is what the filter adds. Then a million requests of ten thousand callers, and the memory of each machine of the
filter after every quarter: the linear memory of its module, which never shrinks, read from the process's map.
"""

import http.client
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
from bench import LIMIT, answer_itself, run, with_rule, without_filter  # noqa: E402
from local import Envoy, Failure, Folder, Redis, get, machine  # noqa: E402

RATE = 300
FROZEN = float(os.environ.get("FROZEN_SECONDS", "30"))
CALM = 5.0
REQUESTS = int(os.environ.get("MEMORY_REQUESTS", "1000000"))
CALLERS = 10000


class Paced:
    """Requests at a steady rate over a few connections to each of two Envoys, in turn."""

    def __init__(self, with_it, without_it):
        self.ports = {"with": with_it.port, "without": without_it.port}
        self.seen = []
        self.ended = threading.Event()
        threads = 16
        self.threads = [threading.Thread(target=self.run, args=(n, threads)) for n in range(threads)]

    def run(self, number, threads):
        connections = {name: http.client.HTTPConnection("127.0.0.1", port, timeout=20) for name, port in self.ports.items()}
        period = threads / RATE
        due = time.perf_counter() + period * number / threads
        while not self.ended.is_set():
            time.sleep(max(0.0, due - time.perf_counter()))
            due = max(due + period, time.perf_counter())
            for name, connection in connections.items():
                began = time.perf_counter()
                connection.request("GET", "/")
                response = connection.getresponse()
                response.read()
                decided = response.headers.get("x-ratelimit-limit") is not None
                self.seen.append((name, began, (time.perf_counter() - began) * 1000, response.status, decided))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        for thread in self.threads:
            thread.join()


def p99(values):
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else float("nan")


def outage(folder):
    redis = folder.add(Redis(folder.path))
    with_it = folder.add(Envoy(folder.path, redis, LIMIT, concurrency=1, edit=answer_itself))
    without_it = folder.add(Envoy(folder.path, redis, LIMIT, concurrency=1, edit=lambda text: without_filter(answer_itself(text))))
    if get(with_it.port).headers.get("x-ratelimit-limit") is None:
        raise Failure("the filter is not where it should be")
    with Paced(with_it, without_it) as paced:
        time.sleep(CALM)
        frozen = time.perf_counter()
        redis.process.send_signal(signal.SIGSTOP)
        time.sleep(FROZEN)
        thawed = time.perf_counter()
        redis.process.send_signal(signal.SIGCONT)
        time.sleep(CALM)
    opened = next((began for name, began, took, _, decided in sorted(paced.seen, key=lambda seen: seen[1])
                   if name == "with" and began > frozen + 0.02 and not decided and took < 20), thawed)
    phases = {
        "Redis answers": (0, frozen - 0.1),
        "frozen, breaker still closed": (frozen, opened),
        "frozen, breaker open": (opened, thawed),
        "thawed": (thawed + 2, float("inf")),
    }
    failed = sum(1 for _, _, _, status, _ in paced.seen if status != 200)
    print(f"Redis frozen for {FROZEN:.0f} s at {RATE} requests/s, redis.timeout 50 ms: {len(paced.seen)} requests, {failed} failed")
    print(f"{'':<32}{'requests':>10}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}{'p99 without the filter':>25}")
    for phase, (start, end) in phases.items():
        times = {name: [took for other, began, took, _, _ in paced.seen if other == name and start <= began < end] for name in paced.ports}
        own, other = times["with"], times["without"]
        if own:
            print(f"{phase:<32}{len(own):>10}{statistics.median(own):>10.2f}{p99(own):>10.2f}{max(own):>10.2f}{p99(other):>25.2f}")
    back = min((began for name, began, _, _, decided in paced.seen if name == "with" and began > thawed and decided), default=None)
    last = max((began for name, began, _, _, decided in paced.seen if name == "with" and began > thawed and not decided), default=thawed)
    print(f"decided by Redis again {back - thawed:.2f} s after it went on; the last request without a decision came {last - thawed:.2f} s after\n"
          if back else "never decided by Redis again\n")


def linear_memories(pid):
    """KiB of each wasm memory of a process: what is readable before the gigabytes that V8 keeps free for it to grow."""
    found, before = [], None
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, end, rights = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line).groups()
        start, end = int(start, 16), int(end, 16)
        if rights.startswith("---") and end - start > 1 << 31 and before and before[1] == start and before[2].startswith("rw"):
            found.append((before[1] - before[0]) // 1024)
        before = (start, end, rights)
    return found


def resident(process):
    """Its resident memory in KiB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text()).group(1))


def memory(folder):
    redis = folder.add(Redis(folder.path))
    rule = with_rule(key=[{"header": "x-api-key"}])
    envoy = folder.add(Envoy(folder.path, redis, LIMIT, concurrency=1, edit=lambda text: rule(answer_itself(text))))
    script = Path(folder.path) / "callers.lua"
    script.write_text(f"""request = function()
  return wrk.format("GET", "/", {{["x-api-key"] = "caller-" .. math.random({CALLERS})}})
end""")
    print(f"{'requests':>10}{'linear memory of each machine, KiB':>40}{'resident Envoy, KiB':>22}")
    served = 0
    shown = 0
    while True:
        if served >= shown:
            print(f"{served:>10}{str(linear_memories(envoy.process.pid)):>40}{resident(envoy.process):>22}")
            shown += REQUESTS // 4
        if served >= REQUESTS:
            break
        command = ["wrk", "--threads", "1", "--connections", "64", "--duration", "2s", "-s", str(script)]
        result = subprocess.run(command + [f"http://127.0.0.1:{envoy.port}/"], capture_output=True, text=True, check=True)
        served += int(re.search(r"(\d+) requests in", result.stdout).group(1))
    print(f"buckets in Redis: {redis.command('DBSIZE')}")


if __name__ == "__main__":
    print(machine())
    sys.exit(run(outage, memory))
