//! Tests what docs/slow-disk.md shows, with the kernel's own NBD client in an emulated host.
//!
//! The tests use a file system on a slow disk, disconnect in the middle, and restart a server.

use std::path::Path;
use std::time::Duration;

use fathom_lab::KvmHost;
use fathom_tests::fathom;

/// Modules that a complete host loads when they are used.
const MODULES: &[&str] = &["nbd", "vsock_loopback"];
const PROGRAMS: &[&str] = &[
    "/usr/sbin/nbd-client",
    "/usr/sbin/sfdisk",
    "/usr/bin/nbdinfo",
    env!("CARGO_BIN_EXE_nbd-disconnect"),
];
const LIMIT: Duration = Duration::from_secs(300);

/// Starts a server and waits until it listens.
const SERVE: &str = r#"
set -e
# Not before it is more than bound.
listens() { grep -q " 00010000 .* $1\$" /proc/net/unix; }
serve() {
    rm -f /tmp/nbd
    fathom serve "$@" >>/tmp/serve.log 2>&1 &
    server=$!
    echo $server >/tmp/server
    for n in $(seq 1200); do
        listens /tmp/nbd && return
        sleep 0.1
    done
    cat /tmp/serve.log
    false
}
# Which lines the kernel has logged of devices since the last look.
dmesg -c >/dev/null
mkdir -p /tmp/mnt
"#;

struct Host(KvmHost);

impl Host {
    fn boot() -> Host {
        let programs: Vec<&Path> = PROGRAMS.iter().map(Path::new).collect();
        Host(KvmHost::boot_with(&fathom(), &programs, MODULES).unwrap())
    }

    /// Runs a script that must succeed. Returns its output.
    fn run(&mut self, script: &str) -> String {
        let said = self.0.check(&format!("{SERVE}\n{script}"), LIMIT);
        said.unwrap_or_else(|error| {
            let log = self.0.output("cat /tmp/serve.log; dmesg | tail -30", LIMIT);
            let log = log.map(|output| output.text).unwrap_or_default();
            panic!("{error}\n{log}")
        })
    }

    /// Returns the figure that the script has printed as `NAME VALUE`.
    fn figure(said: &str, name: &str) -> f64 {
        let line = said.lines().find_map(|line| line.strip_prefix(name));
        let value = line.and_then(|value| value.trim().parse().ok());
        value.unwrap_or_else(|| panic!("no {name} in {said}"))
    }
}

/// The scenario of the post: all other times are small compared to the delay of a read, however
/// busy the machine is.
fn a_file_system_on_a_slow_disk(host: &mut Host) {
    let said = host.run(
        r#"
# Partitioning and mkfs read a hundred times.
serve memory:64M --nbd unix:/tmp/nbd --filter delay:read=50ms
nbd-client -unix /tmp/nbd /dev/nbd0 -b 512
echo ',,' | sfdisk -q --label gpt /dev/nbd0
/usr/bin/mke2fs -q -t ext4 /dev/nbd0p1
mount /dev/nbd0p1 /tmp/mnt
head -c 100000 /dev/urandom >/tmp/mnt/file
sum=$(sha256sum </tmp/mnt/file)
sync
echo 3 >/proc/sys/vm/drop_caches
fathom set $server delay read=2s
before=$(cut -d' ' -f1 /proc/uptime)
test "$sum" = "$(sha256sum </tmp/mnt/file)"
after=$(cut -d' ' -f1 /proc/uptime)
echo "slow $(echo "$after $before" | awk '{ print $1 - $2 }')"
before=$after
test "$sum" = "$(sha256sum </tmp/mnt/file)"
after=$(cut -d' ' -f1 /proc/uptime)
echo "cached $(echo "$after $before" | awk '{ print $1 - $2 }')"
fathom set $server delay read=
umount /tmp/mnt
/usr/bin/e2fsck -fn /dev/nbd0p1
"#,
    );
    let (slow, cached) = (Host::figure(&said, "slow"), Host::figure(&said, "cached"));
    assert!(slow >= 2.0 && cached < slow / 2.0, "{said}");
}

/// Requests that are delayed together end together. The disk stays in use.
///
/// fio's completion latency begins when fio reads the clock after it has submitted.
fn delays_pass_in_parallel(host: &mut Host) {
    let said = host.run(
        r#"
read_some() {
    fio --name=x --filename=/dev/nbd0 --readonly --rw=randread --bs=4k --direct=1 \
        --ioengine=libaio --iodepth=$1 --number_ios=$2 --output-format=json |
        awk '/"lat_ns"/ { seen = 1 } seen && /"mean"/ { gsub(",", ""); print $3 / 1e9; exit }'
}
fathom set $(cat /tmp/server) delay read=2s
echo "alone $(read_some 1 2)"
echo "together $(read_some 16 32)"
"#,
    );
    let (alone, together) = (
        Host::figure(&said, "alone"),
        Host::figure(&said, "together"),
    );
    assert!(alone >= 2.0 && together < 2.0 * alone, "{said}");
}

/// The kernel receives all replies before the connection ends.
fn disconnecting_loses_no_request(host: &mut Host) {
    let said = host.run(
        r#"
nbd-client -d /dev/nbd0
nbd-client -L -unix /tmp/nbd /dev/nbd1 -b 512
dmesg -c >/dev/null
fio --name=x --filename=/dev/nbd1 --readonly --rw=randread --bs=4k --direct=1 \
    --ioengine=libaio --iodepth=16 --number_ios=16 >/tmp/fio.log 2>&1 &
load=$!
while [ "$(awk '{ print $1 }' /sys/block/nbd1/inflight)" -lt 16 ]; do sleep 0.01; done
nbd-disconnect /dev/nbd1
wait $load || { cat /tmp/fio.log; false; }
sleep 1
echo "kernel:"
dmesg
echo "server:"
cat /tmp/serve.log
"#,
    );
    assert!(!said.contains("I/O error"), "{said}");
    let fathom = said.split("server:").nth(1).unwrap_or_default();
    assert!(!fathom.contains("ERROR"), "{said}");
    host.run("kill $(cat /tmp/server)");
}

/// A loop mount survives when its server is killed and restarted, because the NBD client
/// reconnects.
fn a_mount_outlives_its_server(host: &mut Host) {
    host.run(
        r#"
truncate -s 256M /var/tmp/disk.img
serve /var/tmp/disk.img --nbd unix:/tmp/nbd
rm -f /tmp/again
qemu-storage-daemon \
    --blockdev driver=nbd,node-name=n,server.type=unix,server.path=/tmp/nbd,reconnect-delay=120 \
    --nbd-server addr.type=unix,addr.path=/tmp/again \
    --export type=nbd,id=e,node-name=n,name=disk,writable=on &
client=$!
for n in $(seq 1200); do listens /tmp/again && break; sleep 0.1; done
nbd-client -unix /tmp/again -N disk /dev/nbd2 -b 512
/usr/bin/mke2fs -q -t ext4 /dev/nbd2
mount /dev/nbd2 /tmp/mnt
for n in $(seq 12); do
    head -c 200000 /dev/urandom >/tmp/mnt/$n
    sync
    sha256sum /tmp/mnt/$n
done >/tmp/sums &
writer=$!
for round in 1 2; do
    while [ "$(wc -l </tmp/sums)" -lt $((4 * round)) ]; do sleep 0.05; done
    kill -9 $server
    sleep 1
    serve /var/tmp/disk.img --nbd unix:/tmp/nbd
done
wait $writer
test "$(wc -l </tmp/sums)" = 12
echo 3 >/proc/sys/vm/drop_caches
sha256sum -c /tmp/sums
umount /tmp/mnt
/usr/bin/e2fsck -fn /dev/nbd2
if dmesg | grep 'I/O error'; then false; fi
nbd-client -d /dev/nbd2
kill $client
kill $(cat /tmp/server)
"#,
    );
}

/// vsock connects guests and hosts. Here, a host connects to itself.
fn a_vsock_reaches_it(host: &mut Host) {
    let said = host.run(
        r#"
serve memory:64M --nbd vsock:1:10810 --nbd unix:/tmp/nbd
nbdinfo --size 'nbd+vsock://1:10810/'
kill $(cat /tmp/server)
"#,
    );
    assert!(said.contains(&(64 << 20).to_string()), "{said}");
}

#[test]
fn a_slow_disk_under_the_kernel() {
    let mut host = Host::boot();
    a_file_system_on_a_slow_disk(&mut host);
    delays_pass_in_parallel(&mut host);
    disconnecting_loses_no_request(&mut host);
    a_mount_outlives_its_server(&mut host);
    a_vsock_reaches_it(&mut host);
}
