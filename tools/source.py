"""What the sources say of themselves, for those who hand out what was built of them: version, commit, time."""

import os
import re
import subprocess
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


class Failure(Exception):
    """What stands in the way, in one line with its remedy."""


def field(name):
    """A field of text in the manifest of Cargo, where it is written first."""
    found = re.search(rf'^{name} = "(.*)"$', (PROJECT / "Cargo.toml").read_text(), re.MULTILINE)
    if found is None:
        raise Failure(f"Cargo.toml has no {name}")
    return found.group(1)


def git(*arguments):
    """What git says, or nothing: there may be no git, or no commit, as in an archive of the sources."""
    command = ["git", "-C", str(PROJECT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def revision():
    """The commit, with `-modified` where files differ from it; nothing where it is not known."""
    commit = git("rev-parse", "HEAD")
    return f"{commit}-modified" if commit and git("status", "--porcelain") else commit


def time():
    """When the sources were what they are, in seconds since 1970: that of the commit, so that it is the same for everyone."""
    given = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct") or "0"
    if not given.isdigit():
        raise Failure(f"SOURCE_DATE_EPOCH is {given!r}; expected seconds since 1970")
    return int(given)


# What the build calls the source files of others: tools/build.sh and those who built the standard library gave these names. And
# where the linker was built, which it says of itself.
OF_OTHERS = re.compile(rb"(?:%s)/[\w.+/-]+?\.rs|/checkout/src/llvm-project/" % b"|".join([
    rb"crates/[\w-]+-\d[\w.+-]*",
    rb"target/(?:[\w-]+/)?(?:debug|release)/build/[\w-]+/out",
    rb"/rustc/[0-9a-f]{40}",
    rb"/rust/deps/[\w-]+-\d[\w.+-]*",
]))


def without_given_names(data):
    """The data less the names of source files that the build gives on purpose, which are the same on every machine. A program
    has its texts one behind the other, with nothing between them: so a name goes no further than its ending, and one of the
    project's own files, which has no beginning that tells it apart, is one that is there."""
    own = [file.relative_to(PROJECT) for part in ["src", "cli"] for file in (PROJECT / part).rglob("*.rs")]
    data = OF_OTHERS.sub(b"\0", data)
    # The longer first: one may be the end of another.
    for name in sorted((str(file).encode() for file in own), key=len, reverse=True):
        data = data.replace(name, b"\0")
    return data


def refuse_folders_of_this_machine(what, data, remedy):
    """Fails where what was built names a folder of this machine, which nothing may that is handed out. One as short as `/` says
    nothing of a machine, and one such as `/src` is also a part of names that say nothing of it."""
    home = Path.home()
    folders = {home, Path(os.environ.get("CARGO_HOME") or home / ".cargo"), PROJECT}
    left = without_given_names(data)
    for folder in sorted(f"{folder}/" for folder in folders if len(folder.parts) > 1):
        if folder.encode() in left:
            raise Failure(f"{what} names {folder}, a folder of this machine: {remedy}")
