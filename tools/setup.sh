#!/bin/sh
# Installs what building, the demo and the tests need, from the distribution's own packages; virtiofsd, which
# Debian 12 has not got, is built from crates.io. `setup.sh package` installs what makes and tries Debian
# packages, `setup.sh static` what makes a static program, `setup.sh book` what makes the book,
# `setup.sh cluster` what makes Ceph clusters to test with, `setup.sh coverage` what tells which code tests reach,
# `setup.sh instructions` what counts instructions: few need these.
# `setup.sh demo` installs only what the demo needs, and leaves the machine's kernels and QEMU as they are.
#
# Running it again is quick and changes nothing. QEMU comes from the distribution's backports
# where those have a newer one: live migration of vhost-user disks and reconnecting character
# devices are tested with QEMU 10 and up.
set -eu

# What the demo needs.
packages_of_demo='
qemu-system-x86
qemu-utils
seabios
busybox-static
e2fsprogs
fio
util-linux
kmod
xz-utils
zstd
build-essential
'
# Programs the tests and the lab call, and the Debian package that has each.
packages="$packages_of_demo
ovmf
qemu-guest-agent
xfsprogs
btrfs-progs
bonnie++
dosfstools
mtools
systemd-boot-efi
iproute2
iperf3
crun
user-mode-linux
nbdkit
libnbd-bin
nbd-client
fuse3
cryptsetup-bin
fdisk
python3-libnbd
virtnbdbackup
openssl
strace
bpftrace
mount
lz4
libcap-ng-dev
libseccomp-dev
python3
python3-venv
chromium
curl
tmux
libvirt-daemon
libvirt-daemon-driver-qemu
libvirt-clients
groff-base
lowdown
man-db
"
packages_of_package='debootstrap lintian'
packages_of_cluster='ceph-mon ceph-mgr ceph-osd ceph-common librbd1'
qemu_packages='qemu-system-x86 qemu-system-common qemu-system-data qemu-utils'
qemu_wanted=10
rust_wanted=1.90
virtiofsd_wanted=1.14.0
cargo_deb_wanted=3.8.0
mdbook_wanted=0.5.4
index_updated=
old_index='the package index could not be brought up to date; going on with the old one'

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

cache() { echo "${XDG_CACHE_HOME:-$HOME/.cache}/fathom"; }

as_root() {
	if [ "$(id -u)" = 0 ]; then
		env DEBIAN_FRONTEND=noninteractive "$@"
	else
		sudo env DEBIAN_FRONTEND=noninteractive "$@"
	fi
}

# Whether as_root works; sudo may ask for a password.
may_be_root() {
	[ "$(id -u)" = 0 ] || { command -v sudo >/dev/null 2>&1 && sudo env true; }
}

need_root_for() {
	may_be_root || fail "run this as root, or with sudo's permission; missing packages: $*"
}

# Whether packages come from apt: Fedora and others have an apt-get, too, but no use for it.
is_debian_like() {
	command -v apt-get >/dev/null 2>&1 && command -v dpkg-query >/dev/null 2>&1 || return 1
	case " $(. /etc/os-release 2>/dev/null && echo "${ID:-} ${ID_LIKE:-}") " in
	*' debian '* | *' ubuntu '*) return 0 ;;
	*) return 1 ;;
	esac
}

installed() {
	[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

qemu_major() {
	qemu-system-x86_64 --version 2>/dev/null | sed -n '1s/.*version \([0-9]*\)\..*/\1/p'
}

# A kernel for the guests: Debian's cloud flavour boots fastest; others have the same modules.
kernel_package() {
	kernels='linux-image-cloud-amd64 linux-image-virtual linux-image-amd64'
	for candidate in $kernels; do
		if installed "$candidate"; then
			echo "$candidate"
			return
		fi
	done
	for candidate in $kernels; do
		if apt-cache show "$candidate" >/dev/null 2>&1; then
			echo "$candidate"
			return
		fi
	done
	echo linux-image-cloud-amd64
}

# perf: Debian's package; others call theirs by their kernel's tools.
perf_package() {
	for candidate in linux-perf linux-tools-generic; do
		if installed "$candidate" || apt-cache show "$candidate" >/dev/null 2>&1; then
			echo "$candidate"
			return
		fi
	done
	echo linux-perf
}

missing_packages() {
	for package in $packages "$(kernel_package)" "$(perf_package)"; do
		installed "$package" || echo "$package"
	done
}

# Mirrors fail now and then; a failing index must not end the set-up at the first attempt.
update_index() {
	[ -z "$index_updated" ] || return 0
	for wait in 2 5 15 0; do
		if as_root apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -qq update; then
			index_updated=yes
			return 0
		fi
		say "apt-get update failed, trying again in ${wait}s"
		sleep "$wait"
	done
	return 1
}

apt_install() {
	as_root apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=5 -o Dpkg::Use-Pty=0 \
		-qq -y --no-install-recommends install "$@"
}

# Prints the source of the release itself as "URI<newline>Signed-By...", from the deb822 files
# (Signed-By may be a path or an embedded key, which continues on indented lines).
deb822_source() {
	for file in /etc/apt/sources.list.d/*.sources; do
		[ -r "$file" ] || continue
		sed '/^#/d' "$file" | awk -v suite="$1" '
			BEGIN { RS = ""; FS = "\n" }
			function has(list, word,    n, words, i) {
				n = split(list, words, /[ \t\n]+/)
				for (i = 1; i <= n; i++) if (words[i] == word) return 1
				return 0
			}
			{
				split("", field); name = ""
				for (i = 1; i <= NF; i++) {
					if ($i ~ /^[A-Za-z-]+:/) {
						name = tolower(substr($i, 1, index($i, ":") - 1))
						field[name] = substr($i, index($i, ":") + 1)
					} else if (name != "") {
						field[name] = field[name] "\n" $i
					}
				}
				if (tolower(field["enabled"]) ~ /no/ || !has(field["types"], "deb")) next
				if (!has(field["suites"], suite) || !has(field["components"], "main")) next
				n = split(field["uris"], uris, /[ \t\n]+/)
				for (i = 1; i <= n; i++) if (uris[i] ~ /^(https?|tor|mirror)/) break
				if (i > n) next
				print uris[i]
				if (field["signed-by"] != "") print "Signed-By:" field["signed-by"]
				exit
			}'
	done
}

# The same from the one-line format: deb [signed-by=FILE ...] URI SUITE COMPONENT...
oneline_source() {
	for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
		[ -r "$file" ] || continue
		sed 's/#.*//' "$file" | awk -v suite="$1" '
			$1 == "deb" {
				signed = ""; rest = $0; sub(/^[ \t]*deb[ \t]+/, "", rest)
				if (rest ~ /^\[/) {
					options = substr(rest, 2, index(rest, "]") - 2)
					rest = substr(rest, index(rest, "]") + 1)
					n = split(options, option, /[ \t]+/)
					for (i = 1; i <= n; i++)
						if (option[i] ~ /^signed-by=/) signed = substr(option[i], 11)
				}
				n = split(rest, word, /[ \t]+/); first = word[1] == "" ? 2 : 1
				if (word[first + 1] != suite || word[first] !~ /^(https?|tor|mirror)/) next
				for (i = first + 2; i <= n; i++) if (word[i] == "main") {
					print word[first]
					if (signed != "") print "Signed-By: " signed
					exit
				}
			}'
	done
}

# Makes the release's backports known to apt, if the mirror that this machine uses has them.
add_backports() {
	suite=$1-backports
	if apt-get indextargets --format '$(RELEASE)' 2>/dev/null | grep -qx "$suite"; then
		return 0
	fi
	source=$(deb822_source "$1")
	[ -n "$source" ] || source=$(oneline_source "$1")
	# The first matching stanza counts: its URI is line 1, up to the next URI is its key.
	uri=$(printf '%s\n' "$source" | head -n 1)
	[ -n "$uri" ] || return 1
	signed=$(printf '%s\n' "$source" | awk 'NR > 1 && /^(https?|tor|mirror)/ { exit } NR > 1')
	probe=$(mktemp)
	if ! /usr/lib/apt/apt-helper -qq download-file "${uri%/}/dists/$suite/InRelease" "$probe" \
		>/dev/null 2>&1; then
		rm -f "$probe"
		return 1
	fi
	rm -f "$probe"
	say "adding $suite from this machine's own mirror, for a newer QEMU"
	{
		printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\n' "$uri" "$suite"
		[ -z "$signed" ] || printf '%s\n' "$signed"
	} | as_root tee "/etc/apt/sources.list.d/$suite.sources" >/dev/null
	index_updated=
	update_index
}

# Installs QEMU from backports when they have a newer one than what is there.
newer_qemu() {
	codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
	distribution=$(. /etc/os-release && echo "${ID:-}")
	if [ "$distribution" != debian ] || [ -z "$codename" ]; then
		return 0
	fi
	add_backports "$codename" || { say "no $codename-backports on this mirror"; return 0; }
	offered=$(apt-cache madison qemu-system-x86 |
		awk -F' *[|] *' -v suite="$codename-backports/" 'index($3, suite) { print $2; exit }')
	have=$(dpkg-query -W -f='${Version}' qemu-system-x86 2>/dev/null || echo 0)
	if [ -n "$offered" ] && dpkg --compare-versions "$offered" gt "$have"; then
		say "installing QEMU $offered from $codename-backports"
		# What is installed of QEMU's packages must move along: they depend on equal versions.
		also=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' 'qemu-*' 2>/dev/null |
			sed -n 's/^installed //p' | tr '\n' ' ')
		# shellcheck disable=SC2086
		apt_install -t "$codename-backports" $qemu_packages $also
	fi
}

check_qemu() {
	major=$(qemu_major)
	[ -n "$major" ] || fail 'qemu-system-x86_64 does not run'
	if [ "$major" -lt "$qemu_wanted" ]; then
		say "QEMU $major found: tests that need QEMU $qemu_wanted (live migration, reconnect) will fail"
	fi
}

# The version of a package that apt would install; nothing if there is none.
candidate() {
	apt-cache policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: *//p' | grep -vx '(none)'
}

# Installs Rust from Debian's packages: cargo where it is new enough, else cargo-web, the newer
# one that a stable release builds its browsers with. Where both are old, Debian's rustup.
install_rust() {
	need_root_for "cargo (Rust $rust_wanted)"
	update_index || say "$old_index"
	for package in cargo cargo-web; do
		offered=$(candidate "$package") || continue
		if dpkg --compare-versions "$offered" ge "$rust_wanted"; then
			say "installing $package $offered"
			apt_install "$package"
			return
		fi
	done
	candidate rustup >/dev/null || return 0
	say 'installing rustup and a stable Rust'
	apt_install rustup
	rustup toolchain install stable --profile minimal -c clippy -c rustfmt ||
		fail 'rustup could not get a toolchain; when the network allows: rustup toolchain install stable'
}

check_rust() {
	how="install it with rustup (https://rustup.rs), then run this again"
	PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
	if ! command -v cargo >/dev/null 2>&1 && is_debian_like; then
		install_rust
	fi
	command -v cargo >/dev/null 2>&1 || fail "no cargo: Rust $rust_wanted or newer is needed; $how"
	have=$(cargo --version 2>/dev/null | awk '{ print $2 }')
	[ -n "$have" ] || fail "$(command -v cargo) does not run; with rustup: rustup default stable"
	oldest=$(printf '%s\n%s\n' "$rust_wanted" "$have" | sort -V | head -n 1)
	[ "$oldest" = "$rust_wanted" ] ||
		fail "$(command -v cargo) is $have: Rust $rust_wanted or newer is needed;" \
			"rustup update, or without rustup $how"
}

# Those of these that are not here.
absent_programs() {
	for program in "$@"; do
		PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null 2>&1 || echo "$program"
	done
}

check_programs() {
	absent=$(absent_programs qemu-system-x86_64 qemu-img qemu-io qemu-nbd qemu-storage-daemon busybox mke2fs \
		e2fsck debugfs bonnie++ mkfs.fat mcopy fio crun linux.uml losetup unshare ip iperf3 nbdkit \
		nbdinfo nbdcopy nbdsh nbd-client cryptsetup sfdisk openssl strace perf setpriv lz4 cc python3 chromium curl tmux virsh \
		lowdown lexgrog | tr '\n' ' ')
	[ -n "$absent" ] || return 0
	if ! is_debian_like; then
		say 'this is no Debian: install what these packages have, under their Debian names:'
		# shellcheck disable=SC2086,SC2116
		say "linux-image-cloud-amd64 (any kernel with virtio modules) linux-perf $(echo $packages)"
	fi
	fail "programs missing: $absent"
}

# What nobody here has written comes from PyPI, with all that it needs: a client of the API, servers of S3 and
# of files by HTTP.
python_packages() {
	wanted=$(dirname "$0")/requirements.txt
	venv=${CARGO_TARGET_DIR:-$(dirname "$0")/../target}/venv
	! cmp -s "$wanted" "$venv/installed.txt" || return 0
	say "installing Python packages in $venv"
	{
		python3 -m venv --clear "$venv" &&
			"$venv/bin/pip" install --quiet --disable-pip-version-check --retries 10 \
				--requirement "$wanted" &&
			cp "$wanted" "$venv/installed.txt"
	} || fail 'pip could not install them'
}

# Debian 12 has no virtiofsd: it comes from crates.io, into cargo's own folder, once.
install_virtiofsd() {
	PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
	! command -v virtiofsd >/dev/null 2>&1 || return 0
	say "building virtiofsd $virtiofsd_wanted"
	cargo install --quiet --locked --version "$virtiofsd_wanted" virtiofsd ||
		fail 'cargo could not install virtiofsd'
}

# Prometheus, which tests ask what it makes of Fathom's metrics: unpacked, for its package would start a
# server.
unpack_prometheus() {
	dir=$(cache)/prometheus
	[ ! -x "$dir/usr/bin/promtool" ] || return 0
	say "unpacking Prometheus in $dir"
	rm -rf "$dir" "$dir.new"
	mkdir -p "$dir.new"
	(
		cd "$dir.new" || exit
		apt-get download -q prometheus >&2 || { update_index && apt-get download -q prometheus >&2; }
		dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb
	) || fail 'apt could not download prometheus'
	mv "$dir.new" "$dir"
}

# What is missing of these packages, where there is apt.
install_also() {
	is_debian_like || { say "no apt here: install $*, under their Debian names"; return 0; }
	absent=
	for package in "$@"; do
		installed "$package" || absent="$absent $package"
	done
	[ -n "$absent" ] || return 0
	need_root_for "$absent"
	update_index || say "$old_index"
	# shellcheck disable=SC2086
	tell_of $absent
	# shellcheck disable=SC2086
	apt_install $absent || fail "apt could not install:$absent"
}

for_package() {
	# shellcheck disable=SC2086
	install_also $packages_of_package
	have=$(cargo deb --version 2>/dev/null) || have=none
	[ "$have" != "cargo-deb $cargo_deb_wanted" ] || return 0
	say "building cargo-deb $cargo_deb_wanted"
	cargo install --quiet --locked --version "$cargo_deb_wanted" cargo-deb ||
		fail 'cargo could not install cargo-deb'
}

# musl's compiler, for what is C, and Rust's library for it, which only rustup has.
for_static() {
	install_also musl-tools
	target=$(uname -m)-unknown-linux-musl
	[ ! -d "$(rustc --print sysroot)/lib/rustlib/$target" ] || return 0
	rustup target add "$target" || fail "no Rust library for $target: rustup target add $target"
}

# What apt would install for these, packages and their number, before it does.
tell_of() {
	all=$(apt-get -s --no-install-recommends install "$@" 2>/dev/null | grep -c '^Inst ') || all=$#
	say "this installs from the distribution's packages: $*"
	say "($all with all that these need)"
}

# Whether there is a kernel that guests can have.
has_kernel() {
	for image in /boot/vmlinuz-* "$(cache)"/kernel/boot/vmlinuz-*; do
		modules=${image%/boot/*}/lib/modules/${image##*/vmlinuz-}/modules.dep
		[ ! -r "$image" ] || [ ! -r "$modules" ] || return 0
	done
	return 1
}

# A package that has only dependencies: the kernel is in one of these.
image_of() { apt-cache depends "$1" | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1; }

unpack_kernel() {
	! has_kernel || return 0
	dir=$(cache)/kernel
	update_index || say "$old_index"
	image=$(image_of "$(kernel_package)")
	say "unpacking ${image:=$(kernel_package)} in $dir (it is not installed)"
	rm -rf "$dir" "$dir.new"
	mkdir -p "$dir.new"
	(
		cd "$dir.new" || exit
		apt-get download -q "$image" >&2 && dpkg-deb -x "$image"_*.deb . && rm "$image"_*.deb || exit
		[ ! -d usr/lib/modules ] || { mkdir -p lib && mv usr/lib/modules lib/modules; }
		PATH=$PATH:/usr/sbin:/sbin depmod --basedir . "$(ls lib/modules)"
	) || fail "apt could not download $image"
	mv "$dir.new" "$dir"
}

for_demo() {
	# shellcheck disable=SC2086
	install_also $packages_of_demo
	if is_debian_like; then unpack_kernel; fi
	absent=$(absent_programs qemu-system-x86_64 qemu-storage-daemon busybox mke2fs e2fsck blkdiscard fio cc |
		tr '\n' ' ')
	[ -z "$absent" ] || fail "programs missing: $absent"
	check_rust
}

for_book() {
	[ "$(mdbook --version 2>/dev/null)" != "mdbook v$mdbook_wanted" ] || return 0
	say "building mdbook $mdbook_wanted"
	cargo install --quiet --locked --version "$mdbook_wanted" mdbook ||
		fail 'cargo could not install mdbook'
}

# Tools for the counters that the compiler puts in, which only rustup has; and what the tests take from PyPI, once more: it
# is beside what is built.
for_coverage() {
	[ -e "$(rustc --print sysroot)/lib/rustlib/$(rustc -vV | sed -n 's/^host: //p')/bin/llvm-cov" ] ||
		rustup component add llvm-tools || fail 'no llvm-cov: rustup component add llvm-tools'
	python_packages
}

# valgrind, whose callgrind counts.
for_instructions() {
	install_also valgrind
	check_rust
}

# Ceph's daemons and programs, and QEMU's own way to it, which has to be of QEMU's version.
for_cluster() {
	# shellcheck disable=SC2086
	install_also $packages_of_cluster
	installed qemu-block-extra && return 0
	have=$(dpkg-query -W -f='${Version}' qemu-utils)
	tell_of qemu-block-extra
	apt_install "qemu-block-extra=$have" || fail "apt could not install: qemu-block-extra $have"
}

case "${1:-}" in
package | static | book | demo | cluster | coverage | instructions)
	PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
	"for_$1"
	exit
	;;
esac

[ "$(uname -m)" = x86_64 ] || say "only tried on x86_64, this is $(uname -m)"
if is_debian_like; then
	missing=$(missing_packages)
	if [ -n "$missing" ]; then
		# shellcheck disable=SC2086
		need_root_for $missing
		update_index || say "$old_index"
		missing=$(missing_packages | tr '\n' ' ')
		say "installing $missing"
		# shellcheck disable=SC2086
		apt_install $missing || fail "apt could not install: $missing"
	fi
	if [ "$(qemu_major)" -lt "$qemu_wanted" ] 2>/dev/null && may_be_root; then
		newer_qemu
	fi
fi
check_programs
python_packages
check_rust
install_virtiofsd
if is_debian_like; then unpack_prometheus; fi
check_qemu
