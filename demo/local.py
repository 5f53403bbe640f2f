"""A real Redis and a real Envoy on free ports of this machine, for the demo and the benchmark.

Envoy runs the shipped envoy/envoy.yaml. Addresses, ports, paths and limits are put in as text, so what is shown is the
file that a user adapts; a place that is not found is an error, not a silent default.
"""

import http.client
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
ENVOY = PROJECT / ".tools/envoy-1.40.0/envoy"
VALKEY = PROJECT / ".tools/valkey-9.1.2.post2/valkey-server"
MODULE = PROJECT / "target/wasm32-wasip1/release/meshquota.wasm"

# A service to protect, answered by Envoy itself: no process beside Envoy and Redis.
APP = """
  - name: app
    address:
      socket_address: {{address: 127.0.0.1, port_value: {port}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: app
          route_config:
            virtual_hosts:
            - name: app
              domains: ["*"]
              routes:
              - match: {{prefix: "/"}}
                direct_response: {{status: 200, body: {{inline_string: "hello\\n"}}}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
"""


class Failure(Exception):
    """What went wrong, in words for a person."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(ready, process, what, seconds=20):
    """Polls until something is true, or its process ends, or time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Failure(f"{what} ended with status {process.returncode}")
        if ready():
            return
        time.sleep(0.02)
    raise Failure(f"{what} was not ready within {seconds} s")


class Server:
    """A process that was started here and is stopped by its own handle."""

    def __init__(self):
        self.process = None
        self.log = None

    def start(self, command, log):
        self.log = log
        with open(log, "ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Redis(Server):
    """redis-server where it is installed, Valkey otherwise. Keeps nothing on disk."""

    def __init__(self, folder):
        super().__init__()
        self.binary = shutil.which("redis-server") or str(VALKEY)
        self.folder = folder
        self.port = free_port()
        self.up()

    @property
    def name(self):
        words = subprocess.run([self.binary, "--version"], capture_output=True, text=True, check=True).stdout.split()
        version = next((word for word in words if word.startswith("v=")), "")
        return f"{words[0]} {version[2:]}"

    def up(self):
        command = [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
        self.start(command, self.folder / "redis.log")
        wait_until(self.answers, self.process, "redis")

    def answers(self):
        try:
            return self.command("PING") == "PONG"
        except OSError:
            return False

    def kill(self):
        self.process.kill()
        self.process.wait()

    def command(self, *words):
        """One command over a connection of its own, and its reply."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            encoded = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
            connection.sendall(f"*{len(words)}\r\n{encoded}".encode())
            with connection.makefile("rb") as stream:
                return self.reply(stream)

    def reply(self, stream):
        line = stream.readline().decode().rstrip("\r\n")
        kind, rest = line[:1], line[1:]
        if kind == "*":
            return [self.reply(stream) for _ in range(int(rest))]
        if kind == "$":
            return None if rest == "-1" else stream.read(int(rest) + 2)[:-2].decode()
        if kind == ":":
            return int(rest)
        if kind == "-":
            raise Failure(f"redis says: {rest}")
        return rest


class Envoy(Server):
    """Envoy with a shipped configuration. `edit` may change its text further; `app` is the port of a service to protect in
    place of the one that it answers for itself."""

    def __init__(self, folder, redis, limits, concurrency=2, edit=lambda text: text, file="envoy/envoy.yaml", app=None):
        super().__init__()
        if not MODULE.exists():
            raise Failure("the filter is not built: run make build")
        self.port, self.metrics_port, self.admin_port, app_port = (free_port() for _ in range(4))
        text = (PROJECT / file).read_text()
        changes = {
            "  listeners:\n": "  listeners:\n" + APP.format(port=app_port).lstrip("\n"),
            "{address: 0.0.0.0, port_value: 10000}": f"{{address: 127.0.0.1, port_value: {self.port}}}",
            "{address: 0.0.0.0, port_value: 9902}": f"{{address: 127.0.0.1, port_value: {self.metrics_port}}}",
            "{address: app, port_value: 8080}": f"{{address: 127.0.0.1, port_value: {app or app_port}}}",
            "{address: redis, port_value: 6379}": f"{{address: 127.0.0.1, port_value: {redis.port}}}",
            "{address: 127.0.0.1, port_value: 9901}": f"{{address: 127.0.0.1, port_value: {self.admin_port}}}",
            "/etc/meshquota/meshquota.wasm}": f"{MODULE}}}",
            "/etc/meshquota/tunnel.lua}": f"{PROJECT}/lua/tunnel.lua}}",
            '{"capacity": 10, "refill": "2/s"}': limits,
        }
        for place, change in changes.items():
            if place not in text:
                raise Failure(f"{file} has no {place.strip()} any more, which this script replaces")
            text = text.replace(place, change)
        configuration = Path(folder) / f"envoy-{self.port}.yaml"
        configuration.write_text(edit(text))
        command = [str(ENVOY), "-c", str(configuration), "--concurrency", str(concurrency), "--use-dynamic-base-id"]
        self.start(command + ["--log-level", "warning"], Path(folder) / f"envoy-{self.port}.log")
        wait_until(self.ready, self.process, "envoy")

    def ready(self):
        try:
            return get(self.admin_port, "/ready").status == 200
        except OSError:
            return False

    def metrics(self):
        """The filter's metrics as Prometheus sees them: {name with labels: value}."""
        lines = get(self.metrics_port, "/stats/prometheus").body.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("meshquota_"))
        return {name.replace("{}", ""): float(value) for name, value in pairs}


class Response:
    def __init__(self, status, headers, body, milliseconds):
        self.status, self.headers, self.body, self.milliseconds = status, headers, body, milliseconds


def get(port, path="/", source="127.0.0.1"):
    """A GET over a connection of its own, from an address of this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10, source_address=(source, 0))
    try:
        connection.connect()
        began = time.perf_counter()
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read().decode()
        return Response(response.status, response.headers, body, (time.perf_counter() - began) * 1000)
    finally:
        connection.close()


class Folder:
    """A temporary folder, and the servers that live in it. All of it goes when it ends, however it ends."""

    def __enter__(self):
        self.path = Path(tempfile.mkdtemp(prefix="meshquota-"))
        self.servers = []
        return self

    def add(self, server):
        self.servers.append(server)
        return server

    def tail(self, lines=15):
        """The ends of the logs, for a failure's report."""
        for log in sorted(self.path.glob("*.log")):
            yield f"--- {log.name}"
            yield from log.read_text(errors="replace").splitlines()[-lines:]

    def __exit__(self, *_):
        for server in reversed(self.servers):
            server.stop()
        shutil.rmtree(self.path, ignore_errors=True)


def machine():
    """The processor and the number of cores, for a report."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = "unknown processor"
    return f"{model}, {os.cpu_count()} cores"
