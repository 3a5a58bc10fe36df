#!/bin/sh
# Fuzzes what reads from guests, clients and images.
#
#   run.sh TARGET [SECONDS]   fuzzes one target, and begins with the inputs that are kept
#   run.sh --build            builds all targets at once
#   run.sh --keep TARGET      keeps the fewest inputs that reach as much as all that were found
#   run.sh --lines TARGET     tells how many lines of each source file the kept inputs reach
#
# Builds with the coverage instrumentation that libFuzzer needs, which stable
# Rust can do; only the address sanitizer needs a nightly (cargo fuzz run).
# Guest memory lies between guard pages, so stray accesses are found all the
# same. Inputs are kept in corpus/TARGET.tar.gz. New ones are in
# target/inputs/TARGET until then, and those that fail in artifacts/TARGET.
set -eu
cd "$(dirname "$0")"
usage='usage: run.sh TARGET [SECONDS] | --build | --keep TARGET | --lines TARGET'
cargo=${CARGO:-cargo}

counters="--cfg fuzzing -Cpasses=sancov-module \
-Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares"

# With --target, the flags apply to the targets and not to build scripts.
host=$(rustc -vV | sed -n 's/^host: //p')
dir=${CARGO_TARGET_DIR:-target}

build() { RUSTFLAGS=$counters $cargo build --release --target "$host" "$@"; }

# Where a target's inputs are, those that are kept among them.
inputs() {
	inputs=$dir/inputs/$1
	mkdir -p "$inputs"
	[ ! -e "corpus/$1.tar.gz" ] || tar -xzf "corpus/$1.tar.gz" -C "$inputs"
}

# The longest input of a target, in bytes. Images of other programs have headers and tables of whole sectors.
longest() {
	case $1 in
	foreign_image) echo 6144 ;;
	*) echo 1024 ;;
	esac
}

# Without -len_control=0, slow targets get no inputs of more than a few bytes for minutes.
fuzz() {
	build --bin "$1"
	inputs "$1"
	mkdir -p "artifacts/$1"
	exec "$dir/$host/release/$1" -max_total_time="${2:-60}" -max_len="$(longest "$1")" -len_control=0 \
		-artifact_prefix="artifacts/$1/" "$inputs"
}

keep() {
	build --bin "$1"
	inputs "$1"
	fewest=$(mktemp -d)
	trap 'rm -rf "$fewest"' EXIT
	"$dir/$host/release/$1" -merge=1 -max_len="$(longest "$1")" "$fewest" "$inputs"
	mkdir -p corpus
	# The same inputs make the same archive, whoever packs them.
	(cd "$fewest" && LC_ALL=C ls | tar --mtime=@0 --mode=0644 --owner=0 --group=0 --numeric-owner -cf - -T -) |
		gzip -9n >"corpus/$1.tar.gz"
	ls -l "corpus/$1.tar.gz"
}

lines() {
	[ -e "corpus/$1.tar.gz" ] || { echo "no inputs are kept: run.sh --keep $1" >&2; exit 1; }
	tools=$(rustc --print sysroot)/lib/rustlib/$host/bin
	[ -e "$tools/llvm-cov" ] || { echo 'no llvm-cov: rustup component add llvm-tools' >&2; exit 1; }
	# All targets at once: the next one needs no build.
	RUSTFLAGS="$counters -Cinstrument-coverage" CARGO_TARGET_DIR=$dir/lines \
		$cargo build --release --target "$host" --bins
	program=$dir/lines/$host/release/$1
	profile=$dir/lines/$1
	rm -rf "$profile"
	mkdir "$profile"
	tar -xzf "corpus/$1.tar.gz" -C "$profile"
	LLVM_PROFILE_FILE=$profile.profraw "$program" -runs=0 "$profile" 2>"$profile.log" ||
		{ tail -n 30 "$profile.log" >&2; exit 1; }
	"$tools/llvm-profdata" merge --sparse -o "$profile.profdata" "$profile.profraw"
	"$tools/llvm-cov" show --show-instantiations=false --instr-profile="$profile.profdata" "$program" \
		--sources "$(cd .. && pwd)/crates" >"$profile.txt"
	"$tools/llvm-cov" export --summary-only --instr-profile="$profile.profdata" "$program" |
		python3 lines.py
	echo "how often each line ran: $(realpath "$profile.txt")"
}

case ${1:-} in
--build) build --bins ;;
--keep) keep "${2:?$usage}" ;;
--lines) lines "${2:?$usage}" ;;
'' | -*) echo "$usage" >&2; exit 2 ;;
*) fuzz "$@" ;;
esac
