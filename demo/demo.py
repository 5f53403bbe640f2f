"""Shows meshquota at work: `make demo`, or `make demo KEEP=1` to keep it running.

Each thing that is shown is also checked; the exit status is 0 only if all of it was right.
"""

import signal
import sys
import time

from local import Envoy, Failure, Folder, Redis, get

CAPACITY, SECONDS_A_TOKEN = 5, 2
LIMITS = f'{{"capacity": {CAPACITY}, "refill": "1/{SECONDS_A_TOKEN}s"}}'
ANOTHER = "127.0.0.2"

TERMINAL = sys.stdout.isatty()


def paint(code, text):
    return f"\033[{code}m{text}\033[0m" if TERMINAL else text


def title(text):
    print("\n" + paint("1", text))


def check(right, what):
    if not right:
        raise Failure(f"expected {what}")


def show(response, note=""):
    """A response in one line."""
    status = paint("32" if response.status == 200 else "33", str(response.status))
    line = f"  {status}"
    for header, label in (("x-ratelimit-remaining", "remaining"), ("retry-after", "retry-after")):
        if response.headers.get(header) is not None:
            line += f"   {label} {response.headers[header]}"
    print(f"{line}   {response.milliseconds:.1f} ms   {note}".rstrip())
    return response


def remaining(response):
    value = response.headers.get("x-ratelimit-remaining")
    return None if value is None else int(value)


def burst(envoy):
    title(f"A burst of {CAPACITY + 2} requests from 127.0.0.1, whose bucket holds {CAPACITY}")
    responses = [show(get(envoy.port)) for _ in range(CAPACITY + 2)]
    check([r.status for r in responses] == [200] * CAPACITY + [429] * 2, f"{CAPACITY} times 200, then 429")
    check([remaining(r) for r in responses[:CAPACITY]] == list(range(CAPACITY))[::-1], "one less each time")
    denied = responses[-1]
    check(denied.body == "rate limit exceeded\n", "the body of a denial")
    return int(denied.headers["retry-after"])


def another(envoy):
    title(f"Another address, {ANOTHER}, has a bucket of its own")
    try:
        response = show(get(envoy.port, source=ANOTHER))
    except OSError:
        print(f"  (this system has no {ANOTHER}; left out)")
        return
    check(response.status == 200 and remaining(response) == CAPACITY - 1, "a full bucket for another address")


def refill(envoy, retry_after):
    title(f"After the {retry_after} s that retry-after promised")
    time.sleep(retry_after)
    response = show(get(envoy.port), "one token has arrived")
    check(response.status == 200, "that who waits as told is admitted")
    response = show(get(envoy.port), "and no more than one")
    check(response.status == 429, "that only one token has arrived")


def bucket(redis):
    title("The bucket as it lies in Redis")
    key = "quota:{per-ip:127.0.0.1}:0"
    fields = redis.command("HGETALL", key)
    ttl = redis.command("PTTL", key)
    print(f"  {key}")
    print(f"  tokens {fields[1]}   ts {fields[3]}   expires in {ttl / 1000:.1f} s, when it is full")
    check(fields[0::2] == ["tokens", "ts"], "a hash of tokens and ts")
    check(0 < ttl <= (CAPACITY * SECONDS_A_TOKEN + 1) * 1000, "an expiry when the bucket is full")


def outage(envoy, redis):
    title("Redis is killed: requests go on, without headers, and are counted")
    redis.kill()
    # From the other address: that this one is denied is known for a second yet.
    for _ in range(3):
        response = show(get(envoy.port, source=ANOTHER))
        check(response.status == 200 and remaining(response) is None, "that a request goes on without Redis")

    title("Redis is back (with no data, so buckets are full): the limit holds again")
    redis.up()
    deadline = time.monotonic() + 10
    while remaining(response := get(envoy.port, source=ANOTHER)) is None:
        check(time.monotonic() < deadline, "that Redis is found again")
        time.sleep(0.05)
    show(response)
    responses = [get(envoy.port, source=ANOTHER) for _ in range(2 * CAPACITY)]
    show(responses[-1])
    check(responses[-1].status == 429, "a limit after Redis' return")


def metrics(envoy):
    title("What the metrics saw of it")
    wanted = {
        'meshquota_decisions_total{rule="per-ip",outcome="allow"}': CAPACITY,
        'meshquota_decisions_total{rule="per-ip",outcome="deny"}': 3,
        'meshquota_decisions_total{rule="per-ip",outcome="fail_allow"}': 3,
        'meshquota_redis_calls_total{result="ok"}': CAPACITY,
    }
    # Counts are handed to Envoy a moment later.
    deadline = time.monotonic() + 5
    while any((seen := envoy.metrics()).get(name, 0) < least for name, least in wanted.items()):
        check(time.monotonic() < deadline, f"at least {wanted}, not {seen}")
        time.sleep(0.05)
    for name in sorted(seen):
        if seen[name] and "_bucket" not in name and "call_ms" not in name:
            print(f"  {name:<66} {seen[name]:>6.0f}")


def keep(envoy, redis):
    title("Running. Try:")
    print(f"  for i in 1 2 3 4 5 6 7; do curl -si http://127.0.0.1:{envoy.port}/ | grep -E '^HTTP|ratelimit|retry'; done")
    print(f"  curl -s http://127.0.0.1:{envoy.metrics_port}/stats/prometheus | grep ^meshquota")
    print(f"  Redis is on port {redis.port}, Envoy's admin interface on {envoy.admin_port}. Ctrl-C ends it.")
    while all(server.process.poll() is None for server in (envoy, redis)):
        time.sleep(0.2)
    raise Failure("Envoy and Redis running")


def interrupted(*_):
    raise KeyboardInterrupt


def main():
    signal.signal(signal.SIGTERM, interrupted)
    with Folder() as folder:
        try:
            redis = folder.add(Redis(folder.path))
            envoy = folder.add(Envoy(folder.path, redis, LIMITS))
            print(f"{redis.name} and Envoy 1.40.0 with the filter; limit: {LIMITS} for each client address")
            retry_after = burst(envoy)
            another(envoy)
            bucket(redis)
            refill(envoy, retry_after)
            outage(envoy, redis)
            metrics(envoy)
            if "--keep" in sys.argv[1:]:
                keep(envoy, redis)
        except KeyboardInterrupt:
            print()
            return 0 if "--keep" in sys.argv[1:] else 130
        except (Failure, OSError) as failure:
            print(f"\nThe demo failed: {failure}", file=sys.stderr)
            print("\n".join(folder.tail()), file=sys.stderr)
            return 1
    title("All of it was as it should be. `make demo KEEP=1` keeps it running.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
