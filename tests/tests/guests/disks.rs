//! Tests Linux guests on Fathom disks: file systems with every engine and cache mode, the bytes on
//! the host afterwards, and firmware that boots from the disk.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use fathom_lab::{Boot, Disk, Guest, Machine, Server, boot_image};
use fathom_tests::Place;
use fathom_tests::image::{Image, Kind};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const STEP: Duration = Duration::from_secs(120);

/// A way to serve a disk.
#[derive(Debug)]
struct Case {
    name: String,
    args: Vec<&'static str>,
    queues: u16,
    image: Image,
    /// Output of sha256sum in the guest.
    sums: String,
}

impl Case {
    fn new(place: &Place, name: String, kind: Kind, queues: u16, more: &[&'static str]) -> Self {
        let image = Image::create(place.path(&name), kind, 64 * MIB);
        let args = ["--json"].iter().chain(more).copied().collect();
        Self {
            name,
            args,
            queues,
            image,
            sums: String::new(),
        }
    }
}

fn cases(place: &Place) -> Vec<Case> {
    let mut cases = Vec::new();
    for engine in ["io_uring", "native", "threads"] {
        // Linux AIO blocks on the page cache, so these cache modes are refused.
        let caches: &[_] = if engine == "native" {
            &["none"]
        } else {
            &["none", "writeback", "writethrough"]
        };
        for cache in caches.iter().copied() {
            for queues in [1, 2] {
                let mut args = vec!["--aio", engine, "--cache", cache];
                if engine == "io_uring" && queues == 2 {
                    args.push("--register-memory");
                }
                let name = format!("{engine}-{cache}-{queues}");
                cases.push(Case::new(place, name, Kind::RAW, queues, &args));
            }
        }
    }
    let mut add = |name: &str, kind, args: &[&'static str]| {
        cases.push(Case::new(place, name.into(), kind, 2, args));
    };
    let registered = ["--iothreads", "2", "--register-memory"];
    add("qcow2", Kind::QCOW2, &["--aio", "io_uring"]);
    add("qcow2-backed", Kind::QCOW2_BACKED, &registered);
    let cached = ["--aio", "threads", "--cache", "writeback"];
    add("qcow2-subclusters", Kind::QCOW2_SUBCLUSTERS, &cached);
    add("qed", Kind::QED, &["--aio", "native"]);
    let through = ["--iothreads", "2", "--cache", "writethrough"];
    add("qed-backed", Kind::QED_BACKED, &through);
    cases
}

/// Creates a file system with a large file, many small ones, and one that is deleted again.
fn fill(guest: &mut Guest, device: &str, name: &str) {
    let script = format!(
        "mkfs.ext4 -q -F {device}
         mkdir -p /mnt/{name}
         mount -t ext4 {device} /mnt/{name}
         cd /mnt/{name}
         dd if=/dev/urandom of=large bs=64k count=24 2>/dev/null
         dd if=/dev/zero of=doomed bs=64k count=96 2>/dev/null
         mkdir small
         for i in $(seq 40); do echo {name} $i >small/$i; done
         sync
         rm doomed
         sync"
    );
    guest.check(&script, STEP).unwrap();
}

/// Discards free space and reads everything from the disk again. Returns the checksums.
fn trim_and_sum(guest: &mut Guest, name: &str) -> String {
    let script = format!(
        "cd /mnt/{name}
         fstrim .
         find . -type f | sort | xargs sha256sum >/tmp/{name}.sums
         sync
         echo 3 >/proc/sys/vm/drop_caches
         sha256sum -c /tmp/{name}.sums >/tmp/check || {{ grep -v OK /tmp/check; exit 1; }}
         cd /
         umount /mnt/{name}
         cat /tmp/{name}.sums"
    );
    guest.check(&script, STEP).unwrap()
}

fn verify_after_reboot(guest: &mut Guest, device: &str, case: &Case) {
    let script = format!(
        "mkdir -p /mnt/{name}
         mount -t ext4 -o ro {device} /mnt/{name}
         cd /mnt/{name}
         cat >/tmp/{name}.sums <<'END'
{sums}END
         sha256sum -c /tmp/{name}.sums >/tmp/check || {{ grep -v OK /tmp/check; exit 1; }}
         cd /
         umount /mnt/{name}",
        name = case.name,
        sums = case.sums,
    );
    guest.check(&script, STEP).unwrap();
}

#[test]
fn file_systems_on_every_engine_and_cache_mode() {
    let place = Place::new();
    let mut cases = cases(&place);
    let servers: Vec<Server> = cases
        .iter()
        .map(|case| case.image.serve(&place, &case.name, &case.args))
        .collect();
    let disks = cases.iter().zip(&servers).map(|(case, server)| {
        Disk::vhost_user(&case.name, server.socket()).with_queues(case.queues)
    });
    let machine = Machine {
        cpus: 2,
        disks: disks.collect(),
        ..Machine::default()
    };
    let mut guest = Guest::boot(&machine).unwrap();

    for case in &mut cases {
        let device = guest.device(&case.name).unwrap();
        let queues = guest.check(&format!("ls /sys/block/{}/mq | wc -l", &device[5..]), STEP);
        assert_eq!(
            queues.unwrap().trim(),
            case.queues.to_string(),
            "queues of {}",
            case.name
        );
        fill(&mut guest, &device, &case.name);
        let full = case.image.allocated();
        case.sums = trim_and_sum(&mut guest, &case.name);
        let trimmed = case.image.allocated();
        assert!(
            trimmed + 5 * MIB <= full,
            "{}: fstrim gave nothing back to the host: {full} -> {trimmed} bytes",
            case.name
        );
        assert_eq!(case.sums.lines().count(), 41, "{}", case.sums);
    }

    guest.reboot().unwrap();
    for case in &cases {
        let device = guest.device(&case.name).unwrap();
        verify_after_reboot(&mut guest, &device, case);
    }
    guest.power_off().unwrap();
    for (case, server) in cases.iter().zip(servers) {
        check_stages(case, &server.stop().unwrap());
        case.image.check_clean();
        check_on_host(&place, case);
    }
}

/// Checks the server's statistics.
///
/// The guest has read, written, flushed and discarded. For every operation, the stages add up to
/// the total.
fn check_stages(case: &Case, json: &str) {
    let name = &case.name;
    let stats: Value = serde_json::from_str(json).unwrap_or_else(|e| panic!("{name}: {e}: {json}"));
    let operations = stats["operations"].as_array().unwrap();
    // A guest sends no flushes if the disk reports no write cache.
    let flush = (!case.args.contains(&"writethrough")).then_some("flush");
    for wanted in ["read", "write", "discard"].into_iter().chain(flush) {
        let operation = operations
            .iter()
            .find(|operation| operation["op"] == wanted);
        let Some(operation) = operation else {
            panic!("{name}: no {wanted} in {json}")
        };
        let stages = operation["stages"].as_array().unwrap();
        let sum_of =
            |stage: &Value| stage["mean_ns"].as_f64().unwrap() * stage["count"].as_f64().unwrap();
        let total = stages
            .iter()
            .find(|stage| stage["stage"] == "total")
            .unwrap();
        assert!(
            total["count"].as_u64().unwrap() > 0,
            "{name}: no finished {wanted}"
        );
        let parts: f64 = stages
            .iter()
            .filter(|stage| stage["stage"] != "total")
            .map(sum_of)
            .sum();
        let whole = sum_of(total);
        assert!(
            (parts - whole).abs() <= whole * 0.01,
            "{name}: the stages of {wanted} add up to {parts} ns of {whole} ns"
        );
    }
}

/// Checks with QEMU, the kernel and e2fsprogs that the image is a clean file system with the
/// guest's files.
fn check_on_host(place: &Place, case: &Case) {
    let image = case.image.flat();
    let image = image.to_string_lossy();
    fathom_lab::run("e2fsck", &["-f", "-n", &image]).unwrap();
    let copy = place.path("copy");
    let dump = format!("dump /large {}", copy.display());
    fathom_lab::run("debugfs", &["-R", &dump, &image]).unwrap();
    let sum = fathom_lab::run("sha256sum", &[&copy.to_string_lossy()]).unwrap();
    let (sum, _) = sum.split_once(' ').unwrap();
    let expected = format!("{sum}  ./large");
    assert!(
        case.sums.lines().any(|line| line == expected),
        "{}: {expected}",
        case.name
    );
}

/// A step of a deterministic history, in sectors.
enum Step {
    Write { at: u64, count: u64, from: u64 },
    Zero { at: u64, count: u64 },
    Discard { at: u64, count: u64 },
}

/// Overlapping writes of odd lengths, holes in data, and data in holes.
const HISTORY: &[Step] = &[
    Step::Write {
        at: 0,
        count: 4096,
        from: 0,
    },
    Step::Write {
        at: 4097,
        count: 1,
        from: 17,
    },
    Step::Write {
        at: 5000,
        count: 333,
        from: 100,
    },
    Step::Zero {
        at: 1000,
        count: 1024,
    },
    Step::Discard {
        at: 2048,
        count: 2048,
    },
    Step::Write {
        at: 2300,
        count: 7,
        from: 2000,
    },
    Step::Zero {
        at: 5001,
        count: 13,
    },
    Step::Write {
        at: 131_064,
        count: 8,
        from: 300,
    },
    Step::Discard {
        at: 16_384,
        count: 65_536,
    },
    Step::Write {
        at: 20_000,
        count: 2048,
        from: 1,
    },
];
const HISTORY_MIB: u64 = 64;

/// Returns the bytes that both sides know: the output of `seq 1 400000`.
fn known_bytes() -> Vec<u8> {
    (1..=400_000)
        .flat_map(|i| format!("{i}\n").into_bytes())
        .collect()
}

fn history_script(device: &str) -> String {
    let mut script = "[ -e /tmp/known ] || seq 1 400000 >/tmp/known\n".to_owned();
    for step in HISTORY {
        let line = match step {
            Step::Write { at, count, from } => format!(
                "dd if=/tmp/known of={device} bs=512 skip={from} seek={at} count={count} \
                 conv=notrunc,fsync 2>/dev/null"
            ),
            Step::Zero { at, count } => {
                format!(
                    "/usr/bin/blkdiscard -z -f -o {} -l {} {device}",
                    at * 512,
                    count * 512
                )
            }
            Step::Discard { at, count } => {
                format!(
                    "/usr/bin/blkdiscard -f -o {} -l {} {device}",
                    at * 512,
                    count * 512
                )
            }
        };
        script += &line;
        script += "\n";
    }
    script
}

fn apply_history(path: &Path) {
    let known = known_bytes();
    let file = OpenOptions::new().write(true).open(path).unwrap();
    for step in HISTORY {
        match step {
            Step::Write { at, count, from } => {
                let from = usize::try_from(from * 512).unwrap();
                let bytes = usize::try_from(count * 512).unwrap();
                file.write_all_at(&known[from..from + bytes], at * 512)
                    .unwrap();
            }
            // A discarded range of a file is a hole, which reads as zeroes.
            Step::Zero { at, count } | Step::Discard { at, count } => {
                let zeroes = vec![0; usize::try_from(count * 512).unwrap()];
                file.write_all_at(&zeroes, at * 512).unwrap();
            }
        }
    }
}

#[test]
fn the_image_is_what_qemu_img_expects() {
    let place = Place::new();
    // Name, kind of image, options of the server, and a property of QEMU's device.
    let direct: &[&str] = &[];
    let cached: &[&str] = &["--cache", "writeback"];
    let cases = [
        ("direct", Kind::RAW, direct, "queue-size=1024"),
        ("cached", Kind::RAW, cached, "queue-size=64"),
        ("legacy", Kind::RAW, direct, "disable-modern=on"),
        ("no-cache", Kind::RAW, direct, "config-wce=off"),
        ("qcow2", Kind::QCOW2, direct, "queue-size=1024"),
        ("backed", Kind::QCOW2_BACKED, cached, "queue-size=64"),
        (
            "extended",
            Kind::QCOW2_SUBCLUSTERS,
            direct,
            "disable-modern=on",
        ),
        ("qed", Kind::QED_BACKED, direct, "config-wce=off"),
    ];
    let images =
        cases.map(|(name, kind, ..)| Image::create(place.path(name), kind, HISTORY_MIB * MIB));
    let servers: Vec<Server> = cases
        .iter()
        .zip(&images)
        .map(|((name, _, args, _), image)| image.serve(&place, name, args))
        .collect();
    let disks = cases
        .iter()
        .zip(&servers)
        .map(|((name, .., property), server)| {
            Disk::vhost_user(name, server.socket()).with_property(property)
        });
    let machine = Machine {
        disks: disks.collect(),
        ..Machine::default()
    };
    let mut guest = Guest::boot(&machine).unwrap();
    for (name, ..) in cases {
        let device = guest.device(name).unwrap();
        guest.check(&history_script(&device), STEP).unwrap();
    }
    guest.power_off().unwrap();
    for server in servers {
        server.stop().unwrap();
    }

    for image in &images {
        let expected = place.image("expected", HISTORY_MIB * MIB);
        image.write_first_bytes(&expected);
        apply_history(&expected);
        image.check_clean();
        image.expect_bytes_of(&expected);
    }
}

const BIOS_LINE: &str = "FATHOM-BIOS read this from the disk";

#[test]
fn seabios_and_ovmf_boot_from_the_disk() {
    let place = Place::new();
    let raw = place.path("boot.img");
    boot_image::make(&raw, BIOS_LINE, &Machine::default()).unwrap();

    // The machine's devices are transitional. OVMF drives such a device by the legacy interface,
    // without VIRTIO_F_VERSION_1, which many servers refuse.
    let machine = |boot, server: &Server| Machine {
        boot,
        disks: vec![Disk::vhost_user("boot", server.socket())],
        ..Machine::default()
    };
    for (name, kind) in [
        ("raw", Kind::RAW),
        ("qcow2", Kind::QCOW2),
        ("qed", Kind::QED),
    ] {
        let image = Image::with_bytes_of(place.path(name), kind, &raw);
        let server = image.serve(&place, name, &[]);
        let mut guest = Guest::boot(&machine(Boot::SeaBios, &server)).unwrap();
        guest.console().wait_for(BIOS_LINE, 0, STEP).unwrap();
        guest.quit().unwrap();
        server.stop().unwrap();
        image.check_clean();
    }

    // Clouds use a template that does not change, and an overlay of it for each guest.
    let image = Image::with_bytes_of(place.path("overlay"), Kind::QCOW2_BACKED, &raw);
    let server = image.serve(&place, "uefi", &["--readonly"]);
    let mut guest = Guest::boot(&machine(Boot::Ovmf, &server)).unwrap();
    let device = guest.device("boot").unwrap();
    guest
        .check(&format!("grep -q 1 /sys/block/{}/ro", &device[5..]), STEP)
        .unwrap();
    guest.check("test -d /sys/firmware/efi", STEP).unwrap();
    guest.power_off().unwrap();
    server.stop().unwrap();
    image.check_clean();
}
