#!/bin/sh
# cargo build, with what is handed on: the same source gives the same bytes in whatever folder it lies.
#
# Panics name source files, and those of the dependencies lie below the home folder of whoever builds. Here the compiler is
# told other names for such folders, so that what is built differs between no two machines for that, and tells nobody whose
# machine it was. Cargo's own remedy, trim-paths, is not in stable releases.
set -eu
cd -P "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
sources=${CARGO_HOME:-$HOME/.cargo}/registry/src

# Where nothing was fetched ever, the folders below are not known yet.
[ -d "$sources" ] || "$cargo" fetch --locked

separator=$(printf '\037')
flags=
name() {
  flags="${flags:+$flags$separator}--remap-path-prefix=$1=$2"
}
# The last that fits counts. The folder of a registry is named after where it is reached, which may be a mirror.
name "$sources" crates
for registry in "$sources"/*/; do
  name "${registry%/}" crates
done
name "$PWD" .
name "${CARGO_TARGET_DIR:-$PWD/target}" target
commit=$("${RUSTC:-rustc}" -vV | sed -n 's/^commit-hash: //p')
name "$("${RUSTC:-rustc}" --print sysroot)/lib/rustlib/src/rust" "/rustc/$commit"

CARGO_ENCODED_RUSTFLAGS=$flags exec "$cargo" build "$@"
