# What people and continuous integration run. `make demo` and `make test` need nothing else first.
CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)

.DEFAULT_GOAL := build
# With --jobs, these name descriptors that make keeps for itself.
ALONE := env -u MAKEFLAGS -u MFLAGS
FUZZ := $(patsubst fuzz/fuzz_targets/%.rs,fuzz-%,$(wildcard fuzz/fuzz_targets/*.rs))
.PHONY: limiter-draws setup build demo test test-times test-busy test-kvm test-cluster coverage fuzz fuzz-build $(FUZZ) torture test-machines bench bench-scale bench-compare \
	instructions book lint reliability installed install install-files uninstall deb static test-package

# Installs what is missing (Debian packages); quick when everything is there.
setup:
	sh tools/setup.sh

build: setup
	$(CARGO) build --release --package fathom-cli

# Boots a Linux guest with a Fathom disk, reads it, and shows where the time went: first by
# Fathom's own stages, then request by request through guest, KVM, Fathom and host. It installs only
# what that needs, and says so before.
demo:
	sh tools/setup.sh demo
	$(CARGO) build --release --package fathom-cli
	$(TARGET)/release/fathom lab run seqread
	$(TARGET)/release/fathom lab run wiki
	@sh tools/next.sh $(TARGET)/release/fathom

# Unit and property tests, then the end-to-end tests with real guests. The build comes first because the
# end-to-end tests run the fathom binary next to them. TESTS='cli guests' runs only programs with such names.
test: setup
	python3 -m unittest discover tools/bench
	$(CARGO) build --workspace --all-targets
	@$(ALONE) CARGO='$(CARGO)' python3 tools/run_tests.py $(TESTS)

# The same, with a table of how long each program and each test takes. (docs/testing.md has one.)
test-times: setup
	$(CARGO) build --workspace --all-targets
	@$(ALONE) CARGO='$(CARGO)' python3 tools/run_tests.py --times $(TESTS)

# The same on a busy machine.
HOGS ?= 12
test-busy: setup
	$(CARGO) build --workspace --all-targets
	@$(ALONE) CARGO='$(CARGO)' python3 tools/run_tests.py --hogs $(HOGS) $(TESTS)

# Which code `make test` reaches: target/coverage/summary.md, and each line in target/coverage/page. It builds all of it
# once more. TESTS works as there.
coverage: setup
	CARGO_TARGET_DIR=$(TARGET)/coverage sh tools/setup.sh coverage
	CARGO='$(CARGO)' python3 tools/coverage.py $(TESTS)

# What only KVM shows, the wiki's experiment above all, on KVM hosts that are emulated: two processors for ten minutes.
test-kvm: setup
	$(CARGO) build --workspace --bin fathom --test kvm
	$(ALONE) $(CARGO) test --workspace --test kvm

# Disks on Ceph, on clusters of this machine's own: their OSDs keep everything in memory.
test-cluster: setup
	sh tools/setup.sh cluster
	$(CARGO) build --workspace --bin fathom --test cluster
	$(ALONE) $(CARGO) test --workspace --test cluster -- --test-threads=1

# Every fuzz target, or one: `make fuzz-ring`. It begins with the inputs in fuzz/corpus.
FUZZ_SECONDS ?= 60
fuzz: $(FUZZ)

fuzz-build: setup
	$(ALONE) sh fuzz/run.sh --build

$(FUZZ): fuzz-%: fuzz-build
	$(ALONE) sh fuzz/run.sh $* $(FUZZ_SECONDS)

# The randomized tests for longer than in `make test`, with new seeds each time: served images under random
# requests, jobs, power cuts, kills and storage errors; images that are changed offline; all combinations of
# options next to qemu-img. Prints each minute what was tried, and in the end the command that repeats each failure;
# target/torture.json gets a line of it. TORTURE_MINUTES is its size.
TORTURE_SEED ?= $(shell date +%s)
TORTURE_MINUTES ?= 240
torture: setup
	CARGO='$(CARGO)' python3 tools/torture.py $(TORTURE_SEED) $(TORTURE_MINUTES)

# Adds the runs of target/torture.json to the table in docs/reliability.md.
reliability:
	python3 tools/reliability.py

# Draws limits of disks at random, DRAWS of them from LIMITER_SEED on, and scores the verdicts. Nothing else may run.
DRAWS ?= 200
LIMITER_SEED ?= 1
limiter-draws: setup
	$(CARGO) build --workspace --bin fathom --test limiter
	FATHOM_ROUNDS=$(DRAWS) FATHOM_SEED=$(LIMITER_SEED) $(ALONE) $(CARGO) test --workspace --test limiter drawn -- --nocapture

# Many machines, beside and within each other, until no more fit: all processors for some minutes.
test-machines: setup
	$(CARGO) build --workspace --bin fathom --test machines
	$(ALONE) $(CARGO) test --workspace --test machines -- --test-threads=1

# Fathom against qemu-storage-daemon, nbdkit, qemu-nbd and the host itself, on this machine.
bench: build
	$(CARGO) build --release --package fathom-nbd --example floor
	python3 tools/bench/bench.py

# How it scales with the CPUs of this machine: ten minutes. SCALE='--only null nbd' has options of the tool.
bench-scale: build
	python3 tools/bench/scale.py --fathom $(TARGET)/release/fathom $(SCALE)

# An older build against this one, by turns: 20 minutes. Fails if a case is slower.
bench-compare:
	@test -n '$(OLD)' || { echo 'error: name the older program: make bench-compare OLD=FILE' >&2; exit 2; }
	$(MAKE) build
	python3 tools/bench/compare.py --check '$(OLD)' $(TARGET)/release/fathom

# Instructions of a request on its hot paths, against those in tools/bench/instructions.tsv. UPDATE=1 writes them.
instructions:
	sh tools/setup.sh instructions
	CARGO='$(CARGO)' python3 tools/bench/instructions.py $(if $(UPDATE),--update)

# The documentation as pages for a browser, in target/book.
book: build
	sh tools/setup.sh book
	sh tools/book.sh $(TARGET)/release/fathom $(TARGET)/book

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings

# What is installed, and where. DESTDIR stands before all of it.
PREFIX ?= /usr/local
bindir ?= $(PREFIX)/bin
datadir ?= $(PREFIX)/share
mandir ?= $(datadir)/man
sysconfdir ?= /etc
unitdir ?= $(PREFIX)/lib/systemd/system
bashcompdir ?= $(datadir)/bash-completion/completions
zshcompdir ?= $(datadir)/zsh/site-functions
fishcompdir ?= $(datadir)/fish/vendor_completions.d
INSTALL ?= install
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
INSTALLED := $(TARGET)/installed/fathom

installed: setup
	$(CARGO) build --profile installed --package fathom-cli

install: installed install-files
	$(INSTALL) -D -m 755 --strip $(INSTALLED) $(DESTDIR)$(bindir)/fathom
	ln -sf fathom $(DESTDIR)$(bindir)/fathom-vhost-user-blk

# All but the program. A configuration that is there stays.
install-files:
	mkdir -p $(DESTDIR)$(mandir)/man1 $(DESTDIR)$(mandir)/man5 $(DESTDIR)$(bashcompdir) \
		$(DESTDIR)$(zshcompdir) $(DESTDIR)$(fishcompdir) $(DESTDIR)$(unitdir) \
		$(DESTDIR)$(datadir)/qemu/vhost-user
	$(INSTALLED) man $(DESTDIR)$(mandir)/man1
	ln -sf fathom.1 $(DESTDIR)$(mandir)/man1/fathom-vhost-user-blk.1
	sh packaging/pages.sh $(DESTDIR)$(mandir)/man5 $(VERSION)
	$(INSTALLED) completions bash > $(DESTDIR)$(bashcompdir)/fathom
	$(INSTALLED) completions zsh > $(DESTDIR)$(zshcompdir)/_fathom
	$(INSTALLED) completions fish > $(DESTDIR)$(fishcompdir)/fathom.fish
	sed 's,/usr/bin,$(bindir),' packaging/systemd/fathom.service > $(DESTDIR)$(unitdir)/fathom.service
	sed 's,/usr/bin,$(bindir),' packaging/qemu/50-fathom.json \
		> $(DESTDIR)$(datadir)/qemu/vhost-user/50-fathom.json
	$(INSTALL) -D -m 644 packaging/apparmor/fathom \
		$(DESTDIR)$(sysconfdir)/apparmor.d/abstractions/libvirt-qemu.d/fathom
	mkdir -p $(DESTDIR)$(sysconfdir)/libvirt/hooks/qemu.d
	sed 's,/usr/bin,$(bindir),' packaging/libvirt/qemu.d/fathom \
		> $(DESTDIR)$(sysconfdir)/libvirt/hooks/qemu.d/fathom
	chmod 755 $(DESTDIR)$(sysconfdir)/libvirt/hooks/qemu.d/fathom
	mkdir -p $(DESTDIR)$(datadir)/fathom/prometheus $(DESTDIR)$(datadir)/fathom/grafana \
		$(DESTDIR)$(datadir)/fathom/bpftrace
	$(INSTALL) -m 644 packaging/prometheus/*.yml $(DESTDIR)$(datadir)/fathom/prometheus
	$(INSTALL) -m 644 packaging/grafana/fathom.json $(DESTDIR)$(datadir)/fathom/grafana
	for script in packaging/bpftrace/*.bt; do \
		sed 's,/usr/bin/fathom,$(bindir)/fathom,' $$script \
			> $(DESTDIR)$(datadir)/fathom/bpftrace/$${script##*/} || exit; \
	done
	test -e $(DESTDIR)$(sysconfdir)/fathom/fathom.toml || \
		$(INSTALL) -D -m 644 packaging/fathom.toml $(DESTDIR)$(sysconfdir)/fathom/fathom.toml

# A configuration that has been changed stays.
uninstall:
	rm -f $(DESTDIR)$(bindir)/fathom $(DESTDIR)$(bindir)/fathom-vhost-user-blk \
		$(DESTDIR)$(mandir)/man1/fathom.1 $(DESTDIR)$(mandir)/man1/fathom-*.1 \
		$(DESTDIR)$(mandir)/man5/fathom.toml.5 $(DESTDIR)$(mandir)/man5/fathom-run.5 \
		$(DESTDIR)$(bashcompdir)/fathom $(DESTDIR)$(zshcompdir)/_fathom \
		$(DESTDIR)$(fishcompdir)/fathom.fish $(DESTDIR)$(unitdir)/fathom.service \
		$(DESTDIR)$(datadir)/qemu/vhost-user/50-fathom.json \
		$(DESTDIR)$(sysconfdir)/apparmor.d/abstractions/libvirt-qemu.d/fathom \
		$(DESTDIR)$(sysconfdir)/libvirt/hooks/qemu.d/fathom
	! cmp -s packaging/fathom.toml $(DESTDIR)$(sysconfdir)/fathom/fathom.toml || \
		rm $(DESTDIR)$(sysconfdir)/fathom/fathom.toml
	rm -rf $(DESTDIR)$(datadir)/fathom
	-rmdir $(DESTDIR)$(sysconfdir)/fathom

# $(TARGET)/debian/fathom_VERSION-1_ARCH.deb, and its debug symbols beside it. The package has what
# `make install` would install.
deb: installed
	sh tools/setup.sh package
	sh packaging/debian/build.sh $(VERSION)-1

# A program that runs on any Linux of this architecture, such as a guest: `fathom guest record`.
STATIC := $(shell uname -m)-unknown-linux-musl
static: setup
	sh tools/setup.sh static
	CC_$(subst -,_,$(STATIC))=musl-gcc $(CARGO) build --profile installed --package fathom-cli \
		--target $(STATIC)
	strip -o $(TARGET)/fathom-static $(TARGET)/$(STATIC)/installed/fathom
	@ls -l $(TARGET)/fathom-static

# Installs, uses, upgrades and purges the package in minimal Debian 12 and 13 below a temporary directory,
# follows docs/libvirt.md there, and has the static program run where nothing but busybox is. As root.
test-package: deb static
	python3 tools/test_package.py
