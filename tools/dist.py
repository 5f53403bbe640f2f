#!/usr/bin/env python3
"""Gathers what a release hands out, in target/dist/.

    python3 tools/dist.py [--module FILE] [--cli FILE] [--to FOLDER]

    meshquota-VERSION-SYSTEM.tar.gz   everything: the module, its image, the command line, manifests, documents
    meshquota-VERSION.wasm            the module alone
    meshquota-VERSION-image.tar       the image alone
    SHA256SUMS                        of these; the archive has one of its own files

The module and the image are the same for everyone who builds the commit. The archive is the same for the same files. It builds
neither the module nor the command line: `make dist` does, before.
"""

import argparse
import gzip
import platform
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import image
import source

CLI = source.PROJECT / "target/release/meshquota"

# Of the sources, what is of use without them.
KEPT = ["CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "docs", "envoy", "lua/tunnel.lua"]

# What shells need to complete the command line's commands, by their names.
COMPLETIONS = {
    "bash": "completions/meshquota.bash",
    "zsh": "completions/_meshquota",
    "fish": "completions/meshquota.fish",
}

# What is marked as something that runs.
EXECUTABLE = ["bin/meshquota", "envoy/docker/cluster.sh"]

# Compose reads this in the archive, where the module lies elsewhere than in the sources.
ENVIRONMENT = "envoy/docker/.env"
MODULE_LINE = b"\n# The filter of this release.\nMODULE=../../meshquota.wasm\n"


def kept():
    """The files of the sources that go into the archive, by their paths."""
    paths = [source.PROJECT / name for name in KEPT]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return {str(file.relative_to(source.PROJECT)): file.read_bytes() for file in files}


def written_by(cli):
    """What the command line writes about itself: completions and man pages."""
    def said(*arguments):
        ran = subprocess.run([cli, *arguments], capture_output=True, check=False)
        if ran.returncode != 0:
            raise source.Failure(f"{cli} {' '.join(arguments)}: {ran.stderr.decode(errors='replace').strip()}")
        return ran.stdout

    files = {name: said("completions", shell) for shell, name in COMPLETIONS.items()}
    with tempfile.TemporaryDirectory() as folder:
        said("man", folder)
        files |= {f"man/{page.name}": page.read_bytes() for page in Path(folder).glob("*.1")}
    return files


def sums(files):
    """The files' hashes, as `sha256sum -c` reads them."""
    return "".join(f"{sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)).encode()


def archive(files, folder):
    """The files below the folder, compressed."""
    placed = {f"{folder}/{name}": files[name] for name in sorted(files)}
    executable = [f"{folder}/{name}" for name in EXECUTABLE]
    return gzip.compress(image.tar(placed, source.time(), executable), compresslevel=9, mtime=0)


def checked(files):
    """The files, which were built here, where none of them names a folder of this machine."""
    for name, data in files.items():
        source.refuse_folders_of_this_machine(name, data, "run make dist, which builds without such")
    return files


def gather(module, cli):
    """The files of a release, by name."""
    version = source.field("version")
    if not cli.exists():
        raise source.Failure(f"{cli} is not there: run make cli")
    with tempfile.TemporaryDirectory() as work:
        image.write(module, Path(work))
        packed = (Path(work) / "meshquota-image.tar").read_bytes()
    # The sources are the same for everyone, whatever they name, and what is in the image is checked where that is made.
    built = {"meshquota.wasm": module.read_bytes(), "bin/meshquota": cli.read_bytes()}
    files = kept() | checked(written_by(cli) | built)
    files["meshquota-image.tar"] = packed
    files[ENVIRONMENT] += MODULE_LINE
    files["SHA256SUMS"] = sums(files)
    system = f"{platform.system().lower()}-{platform.machine().lower()}"
    release = {
        f"meshquota-{version}-{system}.tar.gz": archive(files, f"meshquota-{version}"),
        f"meshquota-{version}.wasm": files["meshquota.wasm"],
        f"meshquota-{version}-image.tar": packed,
    }
    return release | {"SHA256SUMS": sums(release)}


def main(arguments):
    parser = argparse.ArgumentParser(description="gathers what a release hands out")
    parser.add_argument("--module", type=Path, default=image.MODULE)
    parser.add_argument("--cli", type=Path, default=CLI)
    parser.add_argument("--to", type=Path, default=source.PROJECT / "target/dist")
    given = parser.parse_args(arguments)
    try:
        files = gather(given.module, given.cli)
    except source.Failure as failure:
        print(f"dist: {failure}", file=sys.stderr)
        return 1
    given.to.mkdir(parents=True, exist_ok=True)
    # Nothing of an older release stays.
    for pattern in ["meshquota-*.tar.gz", "meshquota-*.wasm", "meshquota-*-image.tar"]:
        for old in given.to.glob(pattern):
            old.unlink()
    for name, data in files.items():
        (given.to / name).write_bytes(data)
        print(f"{image.shown(given.to)}/{name}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
