"""What the filter costs on this machine: `make bench`.

Each variant is an Envoy of one worker that runs the shipped configuration, changed in one thing; but for the variants with an
upstream the route answers by itself, so that nothing but Envoy, Redis and the load generator (wrk) is measured. Machines are
noisy, so the variants take short turns, and each figure is a ratio within one round; the table shows the median of the rounds
and their quartiles. Beside the table every run goes to target/bench.json, and a chart to target/bench.svg.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
from local import MODULE, PROJECT, Envoy, Failure, Folder, Redis, get, machine  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "15"))
SECONDS = int(os.environ.get("SECONDS_A_RUN", "1"))
GOES_ON = PROJECT / "target/goes_on/wasm32-wasip1/release/floor.wasm"
ANSWERS = PROJECT / "target/answers/wasm32-wasip1/release/floor.wasm"
TELLS = PROJECT / "target/tells/wasm32-wasip1/release/floor.wasm"
ASKS = PROJECT / "target/asks/wasm32-wasip1/release/floor.wasm"
SCRIPT = (PROJECT / "lua/bucket.lua").read_text()
# Everything is admitted: what is measured is the whole way to Redis and back.
LIMIT = '{"capacity": 1000000000000, "refill": "1000000000/s"}'


def answer_itself(text):
    """The route answers, and nothing is logged."""
    direct = 'direct_response: {status: 200, body: {inline_string: "hello\\n"}}'
    return without_log(replace(text, "                route: {cluster: app}\n", f"                {direct}\n"))


def without_log(text):
    return replace(text, text[text.index("          access_log:\n"):text.index("          route_config:\n", text.index("access_log"))], "")


def without_filter(text, instead=""):
    start = text.index("          - name: meshquota\n")
    return replace(text, text[start:text.index("          - name: envoy.filters.http.router\n", start)], instead)


def with_module(module):
    """Runs another filter."""
    return lambda text: replace(text, str(MODULE), str(module))


def encoded(words):
    """A command in RESP."""
    return f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)


def arguments(key, capacity, refill, period_ms, now=0):
    """Those of the script for one charge of one token."""
    return ["1", key, str(capacity), str(refill), str(period_ms), *([str(now)] if now else [])]


def charge(key):
    """What the filter asks for a request under `LIMIT`."""
    return ["EVALSHA", hashlib.sha1(SCRIPT.encode()).hexdigest(), *arguments(key, 1000000000000, 1000000, 1)]


def only_asking(text):
    """Runs the filter that asks Redis by one command, which is its configuration."""
    start = text.index("                  value: |\n")
    block = text[start:text.index("          - name: envoy.filters.http.router\n", start)]
    command = encoded(charge("quota:{per-ip:caller-#####}:0"))
    return with_module(ASKS)(replace(text, block, f"                  value: {json.dumps(command)}\n"))


def with_rule(**fields):
    """Gives the one rule of the shipped configuration these fields."""
    def edit(text):
        rule = {"name": "per-ip", "limits": [json.loads(LIMIT)], **fields}
        return replace(text, f'{{"name": "per-ip", "limits": [{LIMIT}]}}', json.dumps(rule))
    return edit


def many_overrides():
    """Ten thousand callers and ten thousand networks, none of which is the caller of the benchmark."""
    low = {"limits": [{"refill": "1/s"}]}
    values = {"values": [f"203.{n // 65536}.{n // 256 % 256}.{n % 256}" for n in range(10000)], **low}
    cidrs = {"cidrs": [f"10.{n // 256}.{n % 256}.0/24" for n in range(10000)], **low}
    return with_rule(overrides=[values, cidrs])


def without_credentials(text):
    """The Redis of the benchmark knows no users."""
    start = text.index("    typed_extension_protocol_options:\n", text.index("# ADAPT: where Redis"))
    return replace(text, text[start:text.index("    load_assignment:\n", start)], "")


LOCAL_RATELIMIT = """          - name: envoy.filters.http.local_ratelimit
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit
              stat_prefix: local
              token_bucket: {max_tokens: 1000000000, tokens_per_fill: 1000000000, fill_interval: 1s}
              filter_enabled: {default_value: {numerator: 100, denominator: HUNDRED}}
              filter_enforced: {default_value: {numerator: 100, denominator: HUNDRED}}
"""


def local_ratelimit(text):
    """Envoy's own limiter of one process, which asks nobody."""
    return without_filter(text, LOCAL_RATELIMIT)


def two_rules(text):
    limits = [json.loads(LIMIT)]
    rules = [{"name": "per-ip", "limits": limits}, {"name": "per-path", "key": ["client_ip", "path"], "limits": limits}]
    return replace(text, f'{{"name": "per-ip", "limits": [{LIMIT}]}}', ", ".join(json.dumps(rule) for rule in rules))


@dataclasses.dataclass
class Variant:
    """An Envoy, and the load that it gets."""

    edit: callable = lambda text: text
    file: str = "envoy/envoy.yaml"
    # Whether the filter is there, and says so by its headers.
    limits: bool = False
    denied: bool = False
    # Whether each request comes from one of 65,536 addresses by chance, or all from one.
    many_callers: bool = False
    upstream: bool = False


NO_FILTER, GOES, ANSWERS_429 = "no filter", "a wasm filter that only goes on", "a wasm filter that only answers 429"
ONLY_ASKS, ASKS_ROUTED = "a wasm filter that only asks Redis", "one that only asks Redis, an upstream"
TELLS_429 = "one that answers 429 and tells the access log"
MANY, ROUTED = "no filter, many callers", "no filter, an upstream"
ONE_KEY, KEYS = "meshquota, admitted, one hot key", "meshquota, admitted, many keys"
VARIANTS = {
    NO_FILTER: Variant(without_filter),
    MANY: Variant(without_filter, many_callers=True),
    ROUTED: Variant(without_filter, many_callers=True, upstream=True),
    "Envoy's local_ratelimit": Variant(local_ratelimit),
    GOES: Variant(with_module(GOES_ON)),
    "meshquota, no rule meets": Variant(with_rule(match={"path": "/login"})),
    ONLY_ASKS: Variant(only_asking, many_callers=True),
    ONE_KEY: Variant(limits=True),
    KEYS: Variant(limits=True, many_callers=True),
    ASKS_ROUTED: Variant(only_asking, many_callers=True, upstream=True),
    "meshquota, many keys, an upstream": Variant(limits=True, many_callers=True, upstream=True),
    "meshquota, many keys, two rules": Variant(two_rules, limits=True, many_callers=True),
    "meshquota, many keys, through redis_proxy": Variant(
        without_credentials, "envoy/redis-proxy.yaml", limits=True, many_callers=True,
    ),
    "meshquota, many keys, 20,000 overrides": Variant(many_overrides(), limits=True, many_callers=True),
    ANSWERS_429: Variant(with_module(ANSWERS), limits=True, denied=True),
    TELLS_429: Variant(with_module(TELLS), limits=True, denied=True),
    # By a name of its own: the bucket of the others is never empty.
    "meshquota, a denied flood": Variant(
        with_rule(name="flood", limits=[{"capacity": 1, "refill": "1/day"}]), limits=True, denied=True,
    ),
}
# What is compared with what.
RATIOS = [
    ("Envoy's local_ratelimit", NO_FILTER),
    (GOES, NO_FILTER),
    ("meshquota, no rule meets", GOES),
    ("meshquota, no rule meets", NO_FILTER),
    (ONE_KEY, NO_FILTER),
    (ONLY_ASKS, MANY),
    (KEYS, ONLY_ASKS),
    (KEYS, MANY),
    (ASKS_ROUTED, ROUTED),
    ("meshquota, many keys, an upstream", ROUTED),
    ("meshquota, many keys, two rules", KEYS),
    ("meshquota, many keys, through redis_proxy", KEYS),
    ("meshquota, many keys, 20,000 overrides", KEYS),
    (ANSWERS_429, NO_FILTER),
    ("meshquota, a denied flood", ANSWERS_429),
    ("meshquota, a denied flood", TELLS_429),
    ("meshquota, a denied flood", NO_FILTER),
]
# wrk asks for each request here.
CALLERS = """
local random = math.random
math.randomseed(os.time() + os.clock() * 1000000)
function request()
  local address = "100.64." .. random(0, 255) .. "." .. random(0, 255)
  return wrk.format(nil, nil, {["x-forwarded-for"] = address})
end
"""


def replace(text, place, change):
    if place not in text:
        raise Failure(f"envoy/envoy.yaml has no {place.strip()} any more, which this script replaces")
    return text.replace(place, change, 1)


def cpu_seconds(process):
    """What all its threads have run, counted in nanoseconds."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def microseconds(text):
    value, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", text).groups()
    return float(value) * {"us": 1, "ms": 1e3, "s": 1e6}[unit]


def load(envoy, redis, connections, variant, script):
    """One run: requests a second, latencies, and the CPU microseconds a request of Envoy and of Redis."""
    before = [cpu_seconds(server.process) for server in (envoy, redis)]
    told = wrk([envoy], connections, script if variant.many_callers else None)[0]
    cpu = [cpu_seconds(server.process) - other for server, other in zip((envoy, redis), before)]
    requests = answered(told, variant.denied)
    latencies = {f"p{share}_us": microseconds(re.search(rf"(?m)^\s+{share}%\s+(\S+)", told).group(1)) for share in (50, 99)}
    per_request = {"cpu_us": cpu[0] / requests * 1e6, "redis_cpu_us": cpu[1] / requests * 1e6}
    return {"rate": rate(told), "requests": requests, **per_request, **latencies}


def wrk(envoys, connections, script):
    """Loads these Envoys at once, each over so many connections. Returns what is said about each."""
    command = ["wrk", "--threads", "1", "--connections", str(connections), "--duration", f"{SECONDS}s", "--latency"]
    command += ["--script", str(script)] if script else []
    commands = [command + [f"http://127.0.0.1:{envoy.port}/"] for envoy in envoys]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    told = [one.communicate()[0] for one in running]
    if any(one.returncode for one in running):
        raise Failure("wrk failed")
    return told


def rate(told):
    return float(re.search(r"Requests/sec:\s+([\d.]+)", told).group(1))


def answered(told, denied=False):
    """How many requests were answered: all of them admitted, or all of them denied."""
    requests = int(re.search(r"(\d+) requests in", told).group(1))
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", told)
    refused = int(refused.group(1)) if refused else 0
    if refused != (requests if denied else 0):
        raise Failure(f"{refused} of {requests} requests were not admitted")
    return requests


def round_trip(redis):
    """Microseconds that a call of the script takes over plain TCP, one after the other: the median of many."""
    call = encoded(charge("quota:{bench:round-trip}:0")).encode()
    took = []
    with socket.create_connection(("127.0.0.1", redis.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(500):
            began = time.perf_counter()
            connection.sendall(call)
            connection.recv(1000)
            took.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took)


def commands(redis):
    """How often each command was called."""
    text = redis.command("INFO", "commandstats")
    return {name: int(calls) for name, calls in re.findall(r"cmdstat_(\w+):calls=(\d+)", text)}


def quartiles(values):
    return statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3


def spread(values):
    low, middle, high = quartiles(values)
    return f"{middle:8.2f}   ({low:.2f} to {high:.2f})"


def trust_a_hop(text):
    """Callers are told apart by x-forwarded-for, as behind a load balancer."""
    line = "          use_remote_address: true\n"
    return replace(text, line, line + "          xff_num_trusted_hops: 1\n")


def start(folder, redis, variant, upstream):
    def edit(text):
        return variant.edit(trust_a_hop(without_log(text) if variant.upstream else answer_itself(text)))

    app = upstream.port if variant.upstream else None
    envoy = folder.add(Envoy(folder.path, redis, LIMIT, concurrency=1, edit=edit, file=variant.file, app=app))
    limited = get(envoy.port).headers.get("x-ratelimit-limit") is not None
    counted = "http_local_rate_limit.ok: 1" in get(envoy.admin_port, "/stats?filter=local_rate_limit").body
    if limited != variant.limits or counted != (variant.edit is local_ratelimit):
        raise Failure(f"{variant}: the filter is not where it should be")
    return envoy


def measure(folder):
    redis = folder.add(Redis(folder.path))
    redis.command("SCRIPT", "LOAD", SCRIPT)
    if redis.command(*charge("quota:{bench:first}:0"))[0] != 1:
        raise Failure("lua/bucket.lua has other arguments now than this script gives it")
    script = folder.path / "callers.lua"
    script.write_text(CALLERS)
    upstream = start(folder, redis, Variant(without_filter), None)
    envoys = {name: start(folder, redis, variant, upstream) for name, variant in VARIANTS.items()}
    rounds = []
    for number in range(ROUNDS):
        runs = {}
        # The order changes, so that none always runs on a warmer machine.
        order = list(envoys.items())
        order = order[number % len(order):] + order[:number % len(order)]
        for name, envoy in order:
            print(f"\rround {number + 1} of {ROUNDS}: {name:<44}", end="", file=sys.stderr, flush=True)
            variant = VARIANTS[name]
            before = commands(redis)
            runs[name] = {str(connections): load(envoy, redis, connections, variant, script) for connections in (64, 1)}
            after = commands(redis)
            calls = sum(after.get(command, 0) - before.get(command, 0) for command in ("evalsha", "eval"))
            runs[name]["calls"] = calls / sum(runs[name][load]["requests"] for load in ("64", "1")) * 1000
            if name in (ONLY_ASKS, ASKS_ROUTED) and runs[name]["calls"] < 999:
                raise Failure(f"{name}: it has {runs[name]['calls']:.0f} calls for 1000 requests")
        rounds.append({"runs": runs, "round_trip_us": round_trip(redis)})
    print(f"\r{'':<66}\r", end="", file=sys.stderr)
    return redis.name, rounds


# The columns of the table: a heading, and how a run tells it.
COLUMNS = [
    ("requests/s", lambda run: run["64"]["rate"], ".0f"),
    ("Envoy CPU us", lambda run: run["64"]["cpu_us"], ".1f"),
    ("Redis CPU us", lambda run: run["64"]["redis_cpu_us"], ".1f"),
    ("p50 us", lambda run: run["64"]["p50_us"], ".0f"),
    ("p99 us", lambda run: run["64"]["p99_us"], ".0f"),
    ("alone p50", lambda run: run["1"]["p50_us"], ".0f"),
    ("alone p99", lambda run: run["1"]["p99_us"], ".0f"),
    ("calls/1000", lambda run: run["calls"], ".1f"),
]


def report(redis, rounds):
    runs = [one["runs"] for one in rounds]
    print(f"{machine()}; Envoy 1.40.0, one worker; {redis}; {ROUNDS} rounds of {SECONDS} s, medians")
    print("At 64 connections, and alone at one; CPU a request; calls are those of Redis for 1000 requests.\n")
    print(f"{'':<44}" + "".join(f"{heading:>14}" for heading, _, _ in COLUMNS))
    for name in VARIANTS:
        cells = (format(statistics.median(tell(one[name]) for one in runs), form) for _, tell, form in COLUMNS)
        print(f"{name:<44}" + "".join(f"{cell:>14}" for cell in cells))
    for title, field in (("requests/s at 64 connections", "rate"), ("Envoy's CPU a request", "cpu_us")):
        print(f"\n{title}, round by round: median (quartiles)")
        for name, other in RATIOS:
            print(f"{name + ' / ' + other:<78}{spread(ratios(runs, name, other, field))}")
    trip = [one["round_trip_us"] for one in rounds]
    added = [one[KEYS]["1"]["p50_us"] - one[MANY]["1"]["p50_us"] for one in runs]
    print(f"\nAlone, an admitted request takes {statistics.median(added):.0f} us more than without the filter;", end=" ")
    print(f"a call of the script over plain TCP takes {statistics.median(trip):.0f} us.")
    print(f"The module has {MODULE.stat().st_size} bytes.")
    target = PROJECT / "target"
    (target / "bench.json").write_text(json.dumps({"machine": machine(), "redis": redis, "rounds": rounds}, indent=1))
    (target / "bench.svg").write_text(chart(runs))
    print("Every run is in target/bench.json, and a chart in target/bench.svg.")


def ratios(runs, name, other, field):
    return [one[name]["64"][field] / one[other]["64"][field] for one in runs]


def chart(runs):
    """A bar for each ratio of requests a second, with its quartiles, as SVG."""
    height, left, width = 26, 560, 360
    bars = []
    for place, (name, other) in enumerate(RATIOS):
        low, middle, high = quartiles(ratios(runs, name, other, "rate"))
        y = 40 + place * height
        bars.append(f'<text x="{left - 10}" y="{y + 13}" text-anchor="end">{name} / {other}</text>')
        bars.append(f'<rect x="{left}" y="{y}" width="{middle * width:.0f}" height="16" fill="#4477aa"/>')
        bars.append(f'<path d="M{left + low * width:.0f} {y + 8}H{left + high * width:.0f}" stroke="#222" stroke-width="2"/>')
        bars.append(f'<text x="{left + max(high, middle) * width + 8:.0f}" y="{y + 13}">{middle:.2f}</text>')
    bottom = 40 + len(RATIOS) * height
    bars.append(f'<path d="M{left + width} 30V{bottom}" stroke="#999" stroke-dasharray="3"/>')
    title = f"Requests a second at 64 connections, as ratios: medians and quartiles of {len(runs)} rounds ({machine()})"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 160}" height="{bottom + 10}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="10" y="20" font-size="14">{title}</text>{"".join(bars)}</svg>\n'
    )


def run(*parts):
    """Runs parts of a benchmark, each with a folder for its servers. Returns the exit status."""
    if shutil.which("wrk") is None:
        print("wrk is missing: install it, for example with apt-get install wrk", file=sys.stderr)
        return 1
    with Folder() as folder:
        try:
            for part in parts:
                part(folder)
        except (Failure, OSError) as failure:
            print(f"\nThe benchmark failed: {failure}", file=sys.stderr)
            print("\n".join(folder.tail()), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(lambda folder: report(*measure(folder))))
