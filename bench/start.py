"""What the filter adds to the start of a proxy, and to its memory: a part of `make bench`.

Envoys of one and of five workers, with the filter and without it, are started in turn. Of each start are taken the time to the
first answer, and the resident memory after it. What a worker takes is the difference between five workers and one, with the filter
less without it, divided by four. Another start of one worker tells by Envoy's log how long it compiles the module, which a proxy
does once, and how long a worker, from its first turn on, makes its machine and configures it. The linear memory of machines is read as in
outage.py.
"""

import json
import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
from bench import LIMIT, PROJECT, ROUNDS, answer_itself, run, spread, without_filter  # noqa: E402
from local import Envoy, Failure, Redis, get, machine  # noqa: E402
from outage import linear_memories, resident  # noqa: E402

WORKERS = (1, 5)
# Each line begins with its time in seconds, with microseconds, and its thread.
LOG = ["--component-log-level", "wasm:trace,main:debug", "--log-format", "%E.%f %t %v"]


def without(text):
    return without_filter(answer_itself(text))


class Start(Envoy):
    """An Envoy, with the milliseconds to its first answer and its resident KiB after that."""

    def __init__(self, folder, redis, workers, edit, log=()):
        self.more = list(log)
        super().__init__(folder, redis, LIMIT, workers, edit)
        self.resident = resident(self.process)

    def start(self, command, log):
        began = time.perf_counter()
        super().start(command + self.more, log)
        while not self.answered():
            if self.process.poll() is not None or time.perf_counter() - began > 20:
                self.stop()
                raise Failure("envoy does not answer")
            time.sleep(0.001)
        self.milliseconds = (time.perf_counter() - began) * 1000

    def answered(self):
        try:
            # From another address: a connection to a free port from its own would reach itself, by chance.
            return get(self.port, source="127.0.0.2").status == 200
        except OSError:
            return False


def logged(envoy):
    """Milliseconds that Envoy compiles the module, and that its one worker makes a machine of it and configures that."""
    lines = re.findall(r"(?m)^(\d+\.\d+) (\d+) (.*)", envoy.log.read_text())

    def first(beginning, thread=r"\d+"):
        for at, by, text in lines:
            if text.startswith(beginning) and re.fullmatch(thread, by):
                return float(at) * 1000, by
        raise Failure(f"Envoy does not log {beginning} any more")

    compiling, _ = first("Base Wasm created")
    compiled, _ = first("[host->vm] _initialize")
    turn, worker = first("worker entering dispatch loop")
    configured, _ = first("[host<-vm] proxy_on_configure return: 1", worker)
    return compiled - compiling, configured - turn


def measure(folder):
    redis = folder.add(Redis(folder.path))
    kinds = [(name, edit, workers) for workers in WORKERS for name, edit in (("with", answer_itself), ("without", without))]
    rounds = []
    for number in range(ROUNDS):
        print(f"\rround {number + 1} of {ROUNDS}", end="", file=sys.stderr, flush=True)
        one = {}
        # The order changes, as in bench.py.
        turn = number % len(kinds)
        for name, edit, workers in kinds[turn:] + kinds[:turn]:
            envoy = folder.add(Start(folder.path, redis, workers, edit))
            linear = linear_memories(envoy.process.pid)
            one[f"{name} {workers}"] = {"ms": envoy.milliseconds, "kib": envoy.resident, "linear_kib": linear}
            envoy.stop()
        envoy = folder.add(Start(folder.path, redis, 1, answer_itself, LOG))
        envoy.stop()
        one["compile_ms"], one["worker_ms"] = logged(envoy)
        rounds.append(one)
    print(f"\r{'':<66}\r", end="", file=sys.stderr)
    return rounds


def report(rounds):
    few, many = WORKERS

    def added(one, field, workers):
        return one[f"with {workers}"][field] - one[f"without {workers}"][field]

    rows = [
        ("to the first answer without the filter, ms", [one[f"without {few}"]["ms"] for one in rounds]),
        ("to the first answer with the filter, ms", [one[f"with {few}"]["ms"] for one in rounds]),
        ("what the filter adds to that, ms", [added(one, "ms", few) for one in rounds]),
        ("of which compiling the module, once a proxy, ms", [one["compile_ms"] for one in rounds]),
        ("of which a worker's machine, configured, ms", [one["worker_ms"] for one in rounds]),
        ("resident memory without the filter, MiB", [one[f"without {few}"]["kib"] / 1024 for one in rounds]),
        ("what the filter adds to that, MiB", [added(one, "kib", few) / 1024 for one in rounds]),
        ("and for each further worker, MiB", [(added(one, "kib", many) - added(one, "kib", few)) / (many - few) / 1024 for one in rounds]),
        ("linear memory of a machine, MiB", [statistics.median(one[f"with {many}"]["linear_kib"]) / 1024 for one in rounds]),
    ]
    print(f"{machine()}; Envoy 1.40.0, one worker; {ROUNDS} starts of each kind, median (quartiles)\n")
    for name, values in rows:
        print(f"{name:<52}{spread(values)}")
    (PROJECT / "target/start.json").write_text(json.dumps({"machine": machine(), "rounds": rounds}, indent=1))
    print("\nEvery start is in target/start.json.")


if __name__ == "__main__":
    sys.exit(run(lambda folder: report(measure(folder))))
