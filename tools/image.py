#!/usr/bin/env python3
"""Puts the module into an OCI image, as Istio, Envoy Gateway and container engines take it.

    python3 tools/image.py [--module FILE] [--to FOLDER]

Writes FOLDER/image, an OCI layout, and FOLDER/meshquota-image.tar, the same in one file that `docker load` takes too. The
image has one layer, and in it one file, plugin.wasm. Its digest follows from the module and the commit alone: no clock, no
user, no version of a library for compression goes in. It does not build the module: `make image` does, before.
"""

import argparse
import binascii
import datetime
import hashlib
import io
import json
import shutil
import struct
import sys
import tarfile
import tempfile
from pathlib import Path

import source

MODULE = source.PROJECT / "target/wasm32-wasip1/release/meshquota.wasm"
NAME = "meshquota"

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
# Of the OCI layers, those who fetch modules take this kind alone.
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def tar(files, time=0, executable=()):
    """An archive of files by their names, all of that time: the same bytes for the same files, whoever owns them. What runs is
    marked so."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as writer:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), time
            entry.mode = 0o755 if name in executable else 0o644
            writer.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


def gzip_stored(data):
    """The bytes as gzip (RFC 1952) that does not compress: what compresses gives other bytes with each of its versions."""
    largest = 0xFFFF
    blocks = [data[at : at + largest] for at in range(0, len(data), largest)]
    result = [b"\x1f\x8b\x08\0\0\0\0\0\0\xff"]
    for number, block in enumerate(blocks, 1):
        result += [struct.pack("<BHH", number == len(blocks), len(block), len(block) ^ largest), block]
    return b"".join(result) + struct.pack("<II", binascii.crc32(data), len(data) & 0xFFFFFFFF)


def digest(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def as_json(value):
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def layout(module):
    """The files of the OCI layout, by name, and the digest of the image."""
    version, revision = source.field("version"), source.revision()
    created = datetime.datetime.fromtimestamp(source.time(), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = {
        "created": created,
        "title": NAME,
        "description": source.field("description"),
        "version": version,
        "licenses": source.field("license"),
    } | ({"revision": revision} if revision else {})
    about = {f"org.opencontainers.image.{name}": value for name, value in about.items()}
    blobs = {}

    def blob(kind, data):
        blobs[digest(data)] = data
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}

    files = tar({"plugin.wasm": module})
    layer = blob(LAYER, gzip_stored(files))
    # Envoy runs the module on every machine alike; this is the one that those who fetch it ask for.
    config = blob(CONFIG, as_json({
        "architecture": "amd64",
        "os": "linux",
        "created": created,
        "config": {"Labels": about},
        "rootfs": {"type": "layers", "diff_ids": [digest(files)]},
        "history": [{"created": created, "created_by": "make image"}],
    }))
    manifest = blob(MANIFEST, as_json({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config,
        "layers": [layer],
        "annotations": about,
    }))
    names = {
        "org.opencontainers.image.ref.name": version,
        "io.containerd.image.name": f"docker.io/library/{NAME}:{version}",
    }
    platform = {"architecture": "amd64", "os": "linux"}
    index = {"schemaVersion": 2, "manifests": [manifest | {"platform": platform, "annotations": names}]}
    path = lambda descriptor: "blobs/" + descriptor["digest"].replace(":", "/")
    # What engines read that know no OCI layout.
    older = [{"Config": path(config), "RepoTags": [f"{NAME}:{version}"], "Layers": [path(layer)]}]
    written = {
        "oci-layout": as_json({"imageLayoutVersion": "1.0.0"}),
        "index.json": as_json(index),
        "manifest.json": as_json(older),
    }
    return written | {path({"digest": name}): blobs[name] for name in sorted(blobs)}, manifest["digest"]


def checked(path):
    """The module's bytes, where it is one that may be handed out."""
    if not path.exists():
        raise source.Failure(f"{path} is not there: run make build")
    module = path.read_bytes()
    source.refuse_folders_of_this_machine("the module", module, "run make build, which leaves such out")
    return module


def write(module, to):
    """Writes both forms below the folder; the digest of the image."""
    if (to / "image").exists() and not (to / "image/oci-layout").exists():
        raise source.Failure(f"{to}/image is there and no OCI layout, so it is not replaced")
    files, image = layout(checked(module))
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to) as work:
        # Each appears whole or not at all.
        ready = Path(work) / "image"
        for name, data in files.items():
            (ready / name).parent.mkdir(parents=True, exist_ok=True)
            (ready / name).write_bytes(data)
        archive = Path(work) / "archive"
        archive.write_bytes(tar(files))
        shutil.rmtree(to / "image", ignore_errors=True)
        ready.rename(to / "image")
        archive.replace(to / "meshquota-image.tar")
    return image


def shown(path):
    """The path, from here where it is below."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path


def main(arguments):
    parser = argparse.ArgumentParser(description="puts the module into an OCI image")
    parser.add_argument("--module", type=Path, default=MODULE)
    parser.add_argument("--to", type=Path, default=source.PROJECT / "target")
    given = parser.parse_args(arguments)
    try:
        image = write(given.module, given.to)
        version = source.field("version")
    except source.Failure as failure:
        print(f"image: {failure}", file=sys.stderr)
        return 1
    to = shown(given.to)
    print(f"""{to}/image: {image}
{to}/meshquota-image.tar: the same, for docker load

Push it by one of these. The first two keep the digest; Docker makes another.
  skopeo copy oci:{to}/image:{version} docker://registry.example.com/meshquota:{version}
  crane push {to}/image registry.example.com/meshquota:{version}
  docker load -i {to}/meshquota-image.tar &&
    docker tag meshquota:{version} registry.example.com/meshquota:{version} &&
    docker push registry.example.com/meshquota:{version}""")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
