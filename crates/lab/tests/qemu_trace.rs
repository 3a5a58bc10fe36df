//! QEMU's own events from a running QEMU, enabled for the time of a read.

use std::collections::HashMap;
use std::time::Duration;

use fathom_lab::tracers::qemu::Collector;
use fathom_lab::{Aio, Disk, Guest, Machine, QemuDisk, Serving, qemu_version};
use fathom_run::{Clock, Kind, Stream};

const READS: u64 = 50;

/// Events of each name in the stream of a guest that reads.
fn traced(aio: Aio) -> HashMap<String, u64> {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = dir.path().join("image");
    std::fs::write(&image, vec![1; 1 << 20]).unwrap();
    let log = dir.path().join("qemu.log");
    let version = qemu_version().unwrap();
    let collector = Collector::new(&log, version, aio, false).unwrap();
    let mut disk = QemuDisk::read_only(&image);
    (disk.aio, disk.cache) = (aio, "none".into());
    disk.serving = Serving::Thread { polling: None };
    let machine = Machine {
        disks: vec![Disk::qemu("d0", disk)],
        tools: false,
        extra: collector.arguments(),
        ..Machine::default()
    };
    let mut guest = Guest::boot(&machine).unwrap();
    let device = guest.device("d0").unwrap();
    assert_eq!(
        std::fs::metadata(&log).unwrap().len(),
        0,
        "the boot is not traced"
    );
    let missing = collector.start(&mut |command, arguments| guest.qmp(command, arguments));
    assert_eq!(missing.unwrap(), Vec::<String>::new());
    let read = format!("dd if={device} of=/dev/null bs=4k count={READS} iflag=direct");
    guest.check(&read, Duration::from_secs(60)).unwrap();
    collector
        .stop(&mut |command, arguments| guest.qmp(command, arguments))
        .unwrap();
    let collected = collector.collect(dir.path()).unwrap();
    let length = std::fs::metadata(&log).unwrap().len();
    guest.check(&read, Duration::from_secs(60)).unwrap();
    assert_eq!(
        std::fs::metadata(&log).unwrap().len(),
        length,
        "it has stopped"
    );
    guest.power_off().unwrap();

    assert_eq!(collected.problems, Vec::<String>::new());
    let [info] = &collected.streams[..] else {
        panic!("{:?}", collected.streams);
    };
    assert_eq!((info.clock, info.lost), (Clock::HostRealtime, Some(0)));
    let mut stream = Stream::open(&dir.path().join("qemu.events")).unwrap();
    let mut counts = HashMap::new();
    while let Some(event) = stream.next_event().unwrap() {
        assert_eq!(event.kind, Kind::Qemu);
        let name = &stream.header().strings[usize::try_from(event.args[0]).unwrap()];
        *counts.entry(name.clone()).or_insert(0) += 1;
    }
    counts
}

#[test]
fn a_guests_reads_are_seen_in_qemu() {
    for aio in [Aio::Threads, Aio::Native, Aio::IoUring] {
        let counts = traced(aio);
        for name in ["virtio_blk_handle_read", "virtio_blk_rw_complete"] {
            assert_eq!(counts.get(name), Some(&READS), "{aio:?}: {counts:?}");
        }
        let has = |prefix: &str| {
            counts
                .keys()
                .filter(|name| name.starts_with(prefix))
                .count()
        };
        let (pool, ring) = match aio {
            Aio::Threads => (2, 0),
            Aio::Native => (0, 0),
            Aio::IoUring => (0, 2),
        };
        assert_eq!(
            (has("thread_pool_"), has("luring_")),
            (pool, ring),
            "{counts:?}"
        );
        assert!(has("virtio_notify") > 0 && has("virtio_queue_notify") > 0);
    }
}
