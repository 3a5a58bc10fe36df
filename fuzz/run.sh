#!/bin/sh
# Fuzz one target: run.sh TARGET [SECONDS]
# Or build all of them, at once: run.sh --build
#
# Builds with the coverage instrumentation that libFuzzer needs, which stable
# Rust can do; only the address sanitizer needs a nightly (cargo fuzz run).
# Guest memory lies between guard pages, so stray accesses are found all the
# same. Inputs are kept in corpus/TARGET, those that fail in artifacts/TARGET.
set -eu
cd "$(dirname "$0")"
target=${1:?usage: run.sh TARGET [SECONDS]}
seconds=${2:-60}

RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module \
-Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares"
export RUSTFLAGS

# With --target, the flags apply to the targets and not to build scripts.
host=$(rustc -vV | sed -n 's/^host: //p')
case $target in
--build) exec ${CARGO:-cargo} build --release --target "$host" --bins ;;
*) ${CARGO:-cargo} build --release --target "$host" --bin "$target" ;;
esac
dir=${CARGO_TARGET_DIR:-target}
mkdir -p "corpus/$target" "artifacts/$target"
exec "$dir/$host/release/$target" -max_total_time="$seconds" -max_len=1024 \
    -artifact_prefix="artifacts/$target/" "corpus/$target"
