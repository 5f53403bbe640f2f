"""An application that charges the buckets of meshquota.json, by the filter's own script.

    python3 quota.py HOST:PORT take|look|give-back RULE CALLER [COST]
"""

import hashlib
import ipaddress
import json
import pathlib
import socket
import sys

SCRIPT = (pathlib.Path(__file__).parents[3] / "lua/bucket.lua").read_bytes()
SHA1 = hashlib.sha1(SCRIPT).hexdigest()


def address(caller):
    """An address as it stands in a key: IPv4 alone, IPv6 as its /64."""
    ip = ipaddress.ip_address(caller)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


def digest(value):
    """The value of a header, a cookie, a parameter or a property as it stands in a key."""
    return "#" + hashlib.sha256(value.strip().encode()).hexdigest()[:32]


# The keys of a caller under each rule, one for each limit, and the limits: capacity, and refill as tokens every so many
# milliseconds, in lowest terms. `meshquota explain FILE --json` prints them for a request.
RULES = {
    "per-ip": (lambda caller: [f"quota:{address(caller)}"], [(10, 1, 360_000)]),
    "plan": (
        lambda caller: [f"quota:{{plan:{digest(caller)}}}:{limit}" for limit in (0, 1)],
        [(5, 1, 720_000), (20, 1, 4_320_000)],
    ),
}


class Redis:
    """As much of the protocol as the script needs; any client library does as well."""

    def __init__(self, host, port):
        self.stream = socket.create_connection((host, port), timeout=1).makefile("rwb")

    def command(self, *words):
        words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        self.stream.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
        self.stream.flush()
        return self.reply()

    def reply(self):
        line = self.stream.readline().rstrip(b"\r\n")
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        raise RuntimeError(rest.decode() or "the connection was closed")


def charge(redis, rule, caller, cost=1, count=1):
    """Charges all limits of a rule, or none. A count of 0 only looks, one of -1 gives a charge back."""
    keys_of, limits = RULES[rule]
    keys = keys_of(caller)
    # The 0 is the time: the server's own, so that no clock of an application counts.
    arguments = [len(keys), *keys, *(number for limit in limits for number in limit), 0, cost, count]
    try:
        reply = redis.command("EVALSHA", SHA1, *arguments)
    except RuntimeError as error:
        # Nothing else may be sent again: it may have been charged.
        if not str(error).startswith("NOSCRIPT"):
            raise
        reply = redis.command("EVAL", SCRIPT, *arguments)
    return dict(zip(("granted", "remaining", "retry_after_ms", "reset_after_ms"), reply))


if __name__ == "__main__":
    place, action, rule, caller, *cost = sys.argv[1:]
    host, port = place.rsplit(":", 1)
    count = {"take": 1, "look": 0, "give-back": -1}[action]
    answer = charge(Redis(host, int(port)), rule, caller, *map(int, cost), count=count)
    print(json.dumps(answer))
    # Like the script: nothing is granted by a look, which is refused where one charge would not fit.
    sys.exit(answer["retry_after_ms"] != 0)
