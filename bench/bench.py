"""What the filter costs on this machine: `make bench`.

Two Envoys of one worker each run the shipped configuration, one with the filter and one without it; the route answers by
itself, so that nothing but Envoy, Redis and the load generator (wrk) is measured. Machines are noisy, so the two take
turns, and each figure is a ratio within one round; the table shows the median of the rounds and their spread.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
from local import MODULE, PROJECT, Envoy, Failure, Folder, Redis, get, machine  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "7"))
SECONDS = int(os.environ.get("SECONDS_A_RUN", "3"))
CONNECTIONS = 64
# Everything is admitted: what is measured is the whole way to Redis and back.
LIMITS = '{"capacity": 1000000000000, "refill": "1000000000/s"}'
TICKS = os.sysconf("SC_CLK_TCK")


def answer_itself(text):
    """The route answers, and nothing is logged."""
    direct = 'direct_response: {status: 200, body: {inline_string: "hello\\n"}}'
    text = replace(text, "                route: {cluster: app}\n", f"                {direct}\n")
    return replace(text, text[text.index("          access_log:\n"):text.index("          route_config:\n", text.index("access_log"))], "")


def without_filter(text):
    text = answer_itself(text)
    start = text.index("          - name: meshquota\n")
    return replace(text, text[start:text.index("          - name: envoy.filters.http.router\n", start)], "")


def replace(text, place, change):
    if place not in text:
        raise Failure(f"envoy/envoy.yaml has no {place.strip()} any more, which this script replaces")
    return text.replace(place, change, 1)


def cpu_seconds(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def load(envoy, connections):
    """One run: requests a second, the median latency in microseconds, Envoy's CPU microseconds a request."""
    before = cpu_seconds(envoy.process)
    command = ["wrk", "--threads", "1", "--connections", str(connections), "--duration", f"{SECONDS}s", "--latency"]
    result = subprocess.run(command + [f"http://127.0.0.1:{envoy.port}/"], capture_output=True, text=True, check=True)
    cpu = cpu_seconds(envoy.process) - before
    requests = int(re.search(r"(\d+) requests in", result.stdout).group(1))
    if "Non-2xx" in result.stdout:
        raise Failure("some requests were not admitted")
    value, unit = re.search(r"50%\s+([\d.]+)(us|ms|s)", result.stdout).groups()
    latency = float(value) * {"us": 1, "ms": 1e3, "s": 1e6}[unit]
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", result.stdout).group(1))
    return {"rate": rate, "p50_us": latency, "cpu_us": cpu / requests * 1e6, "requests": requests}


def commands(redis):
    """How often each command was called."""
    text = redis.command("INFO", "commandstats")
    return {name: int(calls) for name, calls in re.findall(r"cmdstat_(\w+):calls=(\d+)", text)}


def spread(values):
    return f"{statistics.median(values):8.2f}   ({min(values):.2f} to {max(values):.2f})"


def measure(folder):
    redis = folder.add(Redis(folder.path))
    with_it = folder.add(Envoy(folder.path, redis, LIMITS, concurrency=1, edit=answer_itself))
    without = folder.add(Envoy(folder.path, redis, LIMITS, concurrency=1, edit=without_filter))
    if get(with_it.port).headers.get("x-ratelimit-limit") is None or get(without.port).headers.get("x-ratelimit-limit"):
        raise Failure("the filter is not where it should be")
    rounds = []
    for number in range(ROUNDS):
        print(f"\rround {number + 1} of {ROUNDS}", end="", file=sys.stderr, flush=True)
        before = commands(redis)
        # The order changes, so that neither always runs on a warmer machine.
        order = [("with", with_it), ("without", without)]
        runs = {}
        for name, envoy in order if number % 2 else reversed(order):
            runs[name] = {"many": load(envoy, CONNECTIONS), "one": load(envoy, 1)}
        after = commands(redis)
        calls = sum(after.get(name, 0) - before.get(name, 0) for name in ("evalsha", "eval"))
        runs["redis_per_request"] = calls / sum(run["requests"] for run in runs["with"].values())
        rounds.append(runs)
    print("\r", end="", file=sys.stderr)
    return redis.name, rounds


def report(redis, rounds):
    def ratio(connections, figure):
        return [r["with"][connections][figure] / r["without"][connections][figure] for r in rounds]

    added = [r["with"]["one"]["p50_us"] - r["without"]["one"]["p50_us"] for r in rounds]
    cpu = {name: [r[name]["many"]["cpu_us"] for r in rounds] for name in ("without", "with")}
    rows = [
        (f"requests/s at {CONNECTIONS} connections, with / without", ratio("many", "rate")),
        (f"Envoy's CPU a request at {CONNECTIONS} connections, with / without", ratio("many", "cpu_us")),
        ("  without, in microseconds", cpu["without"]),
        ("  with, in microseconds", cpu["with"]),
        ("p50 added at 1 connection, in microseconds", added),
        ("Redis commands a request", [r["redis_per_request"] for r in rounds]),
    ]
    print(f"{machine()}; Envoy 1.40.0, one worker; {redis}; {ROUNDS} rounds of {SECONDS} s, median (least to most)\n")
    for name, values in rows:
        print(f"{name:<62}{spread(values)}")
    print(f"{'module, in bytes':<62}{MODULE.stat().st_size:>8}")
    target = PROJECT / "target/bench.json"
    target.write_text(json.dumps({"machine": machine(), "redis": redis, "rounds": rounds}, indent=1))
    print(f"\nEvery run is in {target.relative_to(PROJECT)}.")


def main():
    if shutil.which("wrk") is None:
        print("wrk is missing: install it, for example with apt-get install wrk", file=sys.stderr)
        return 1
    with Folder() as folder:
        try:
            report(*measure(folder))
        except (Failure, OSError) as failure:
            print(f"\nThe benchmark failed: {failure}", file=sys.stderr)
            print("\n".join(folder.tail()), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
