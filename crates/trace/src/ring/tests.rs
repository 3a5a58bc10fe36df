use super::header::{HEADER, MIN_CAPACITY};
use super::*;
use proptest::prelude::*;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

fn record(n: u64) -> TraceRecord {
    TraceRecord {
        stamps: std::array::from_fn(|i| n.saturating_add(i as u64)),
        offset: n.wrapping_mul(512),
        len: n.wrapping_mul(3),
        queue: n as u16,
        op: Op::ALL[n as usize % Op::COUNT],
        error: n as i32,
        polled: n.is_multiple_of(2),
        wire: [Wire::None, Wire::Came(n), Wire::Went(!n), Wire::Several][n as usize % 4],
    }
}

fn trace(rings: usize, capacity: usize) -> (TempDir, PathBuf, RingFile) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let file = RingFile::create(&path, "disk", rings, capacity).unwrap();
    (dir, path, file)
}

fn poll(reader: &mut RingReader) -> Vec<TraceRecord> {
    let mut entries = Vec::new();
    reader.poll(&mut entries).unwrap();
    entries.into_iter().map(|e| e.record).collect()
}

#[test]
fn the_header_says_what_the_writer_was_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let name = "ü".repeat(200) + "\n";
    let _file = RingFile::create(&path, &name, 3, 1000).unwrap();
    let reader = RingReader::open(&path).unwrap();
    let header = reader.header();
    assert_eq!(header.disk, "ü".repeat(127));
    assert_eq!((header.rings, header.capacity), (3, 1024));
    assert_eq!(header.pid, std::process::id());
    assert_eq!(header.tsc, crate::Clock::get().is_tsc());
    let now = header.monotonic(crate::Clock::get().now()) as f64;
    let real = crate::clock::monotonic_ns() as f64;
    assert!((now - real).abs() < 1e9, "{now} {real}");
    let since_epoch = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as f64;
    let realtime = header.realtime(crate::Clock::get().now()) as f64;
    assert!((realtime - since_epoch).abs() < 1e9);
}

#[test]
fn records_come_once_in_order_and_from_every_ring() {
    let (_dir, path, mut file) = trace(2, 128);
    let mut writers = [file.writer(0), file.writer(1)];
    let mut reader = RingReader::open(&path).unwrap();
    assert_eq!(poll(&mut reader), []);
    (0..100).for_each(|n| writers[n % 2].write(&record(n as u64)));
    let mut entries = Vec::new();
    assert_eq!(reader.poll(&mut entries).unwrap(), 100);
    for ring in 0..2 {
        let of_ring = entries.iter().filter(|e| e.ring == ring);
        let expected = (0..100).filter(|n| n % 2 == u64::from(ring)).map(record);
        assert!(of_ring.map(|e| e.record).eq(expected));
    }
    assert_eq!(reader.poll(&mut entries).unwrap(), 0);
    writers[0].write(&record(100));
    assert_eq!(poll(&mut reader), [record(100)]);
    assert_eq!(reader.lost(), 0);
}

#[test]
fn a_slow_reader_loses_the_oldest_and_knows_how_many() {
    let (_dir, path, mut file) = trace(1, 128);
    let mut writer = file.writer(0);
    let mut reader = RingReader::open(&path).unwrap();
    (0..1000).for_each(|n| writer.write(&record(n)));
    assert!(poll(&mut reader).into_iter().eq((872..1000).map(record)));
    assert_eq!(reader.lost(), 872);
    let mut late = RingReader::open(&path).unwrap();
    assert_eq!(poll(&mut late).len(), 128);
    assert_eq!(late.lost(), 872);
}

#[test]
fn a_reader_of_a_fast_writer_never_sees_a_torn_record() {
    const RECORDS: u64 = 2_000_000;
    let (_dir, path, mut file) = trace(1, MIN_CAPACITY as usize);
    let mut writer = file.writer(0);
    let mut reader = RingReader::open(&path).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..RECORDS {
                writer.write(&record(n));
                if n % 64 == 0 {
                    // Lets the reader come close to the writer, which is the difficult case.
                    (0..n / 64 % 2000).for_each(|_| std::hint::spin_loop());
                }
            }
            done.store(true, Ordering::Release);
        });
        let (mut next, mut read) = (0, 0);
        loop {
            let last = done.load(Ordering::Acquire);
            for seen in poll(&mut reader) {
                assert!(seen.stamps[0] >= next, "{seen:?} after {next}");
                assert_eq!(seen, record(seen.stamps[0]));
                next = seen.stamps[0] + 1;
                read += 1;
            }
            if last {
                break;
            }
        }
        assert_eq!(next, RECORDS);
        assert_eq!(read + reader.lost(), RECORDS);
        assert!(read >= u64::from(MIN_CAPACITY));
    });
}

#[test]
fn a_trace_is_live_until_its_last_writer_is_gone() {
    let (_dir, path, mut file) = trace(1, 128);
    let writer = file.writer(0);
    let reader = RingReader::open(&path).unwrap();
    drop(file);
    assert!(reader.is_live());
    assert!(reader.is_live());
    drop(writer);
    assert!(!reader.is_live());
}

#[test]
fn an_older_trace_is_replaced_and_its_reader_keeps_it() {
    let (_dir, path, mut file) = trace(1, 128);
    file.writer(0).write(&record(1));
    let mut older = RingReader::open(&path).unwrap();
    let mut newer = RingFile::create(&path, "disk", 1, 128).unwrap();
    newer.writer(0).write(&record(2));
    assert_eq!(poll(&mut older), [record(1)]);
    let mut reader = RingReader::open(&path).unwrap();
    assert_eq!(poll(&mut reader), [record(2)]);
}

#[test]
fn what_is_not_a_trace_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk.img");
    std::fs::write(&image, "precious").unwrap();
    for path in [image.as_path(), dir.path(), Path::new("/dev/null")] {
        let error = RingFile::create(path, "disk", 1, 128).err().unwrap();
        assert!(error.to_string().contains("not a trace"), "{error}");
    }
    assert_eq!(std::fs::read(&image).unwrap(), b"precious");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    std::fs::write(&image, "").unwrap();
    assert!(RingFile::create(&image, "disk", 1, 128).is_ok());
}

#[test]
fn impossible_sizes_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    for (rings, capacity) in [
        (0, 128),
        (1025, 128),
        (1, 1 << 30),
        (usize::MAX, usize::MAX),
    ] {
        assert!(RingFile::create(&path, "disk", rings, capacity).is_err());
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_damaged_header_is_refused() {
    let (_dir, path, _file) = trace(1, 128);
    let good = std::fs::read(&path).unwrap();
    for at in [0, 7, 8, 12, 15, 16, 19, 20, 23, 28, 31, 39, 66] {
        let mut bad = good.clone();
        bad[at] ^= 0xc1;
        std::fs::write(&path, &bad).unwrap();
        let error = RingReader::open(&path).expect_err("damaged");
        assert!(!error.to_string().is_empty());
    }
    for len in [0, 1, HEADER - 1, HEADER, good.len() - 1] {
        std::fs::write(&path, &good[..len]).unwrap();
        assert!(RingReader::open(&path).is_err(), "{len}");
    }
    assert!(RingReader::open(Path::new("/dev/zero")).is_err());
    assert!(RingReader::open(path.parent().unwrap()).is_err());
}

#[test]
fn a_file_cut_short_under_the_reader_is_an_error() {
    let (_dir, path, mut file) = trace(1, 128);
    file.writer(0).write(&record(1));
    let mut reader = RingReader::open(&path).unwrap();
    let cut = OpenOptions::new().write(true).open(&path).unwrap();
    cut.set_len(HEADER as u64 + 10).unwrap();
    let error = reader.poll(&mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("truncated"), "{error}");
}

/// A second writer appends wherever the first writer stopped.
#[test]
fn another_writer_goes_on_behind_the_last_record() {
    for before in [0, 1, 2, 100, 127, 128, 129, 255, 256, 257, 1000] {
        let (_dir, path, mut file) = trace(2, 128);
        let mut first = file.writer(1);
        let mut reader = RingReader::open(&path).unwrap();
        let mut found = Vec::new();
        for n in 0..before {
            first.write(&record(n));
            found.extend(poll(&mut reader));
        }
        let shared = File::from(file.file().try_clone_to_owned().unwrap());
        drop((file, first));
        let mut next = RingFile::resumed(&path, shared).unwrap();
        assert_eq!(next.rings(), 2);
        let mut second = next.writer(1);
        next.own();
        for n in before..before + 200 {
            second.write(&record(n));
            found.extend(poll(&mut reader));
        }
        let expected: Vec<_> = (0..before + 200).map(record).collect();
        assert!(found == expected, "{before}");
        assert_eq!(reader.lost(), 0);
    }
}

proptest! {
    #[test]
    fn what_is_written_is_what_is_read(
        deltas in any::<[u32; Stage::COUNT + 1]>(),
        offset: u64, len: u64, queue: u16, error: i32, polled: bool, op in 0..Op::COUNT,
        wire in 0..4u8, cookie: u64,
    ) {
        let mut at = 0;
        let stamps = deltas.map(|delta| { at += u64::from(delta); at });
        let op = Op::ALL[op];
        let wire = Wire::from_words(wire, cookie).unwrap();
        let record = TraceRecord { stamps, offset, len, queue, op, error, polled, wire };
        prop_assert_eq!(decode(&encode(&record)), Some(record));
    }

    /// Reading any content of the file ends without a panic.
    #[test]
    fn garbage_is_survived(words in proptest::collection::vec((0..2000u64, any::<u64>()), 0..300)) {
        let (_dir, path, mut file) = trace(2, 128);
        let mut writer = file.writer(1);
        (0..200).for_each(|n| writer.write(&record(n)));
        let raw = File::options().write(true).open(&path).unwrap();
        for (at, word) in words {
            let word = if word % 2 == 0 { word } else { word >> 54 };
            raw.write_all_at(&word.to_ne_bytes(), HEADER as u64 + at * 8).unwrap();
        }
        let mut reader = RingReader::open(&path).unwrap();
        for _ in 0..10 {
            if reader.poll(&mut Vec::new()).is_err() {
                break;
            }
        }
    }
}

#[test]
fn a_writer_survives_that_its_file_is_cut() {
    for len in [0, HEADER as u64 + 4096] {
        let (_dir, path, mut file) = trace(2, 128);
        let mut writers = [file.writer(0), file.writer(1)];
        let is_cut = |file: &RingFile| {
            use rustix::event::{PollFd, PollFlags, Timespec, poll};
            let event = file.cut_event();
            let mut fds = [PollFd::new(&event, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
        };
        writers[1].write(&record(0));
        let other = OpenOptions::new().write(true).open(&path).unwrap();
        other.set_len(len).unwrap();
        assert!(!is_cut(&file), "nobody has touched it");
        for n in 1..300 {
            writers
                .iter_mut()
                .for_each(|writer| writer.write(&record(n)));
        }
        file.calibrate();
        assert!(is_cut(&file), "{len}");
        assert_eq!(other.metadata().unwrap().len(), len);
        // After the file was extended again, it does not have its old content.
        other.set_len(1 << 20).unwrap();
        writers
            .iter_mut()
            .for_each(|writer| writer.write(&record(300)));
        // The next trace is not affected.
        std::fs::remove_file(&path).unwrap();
        let mut next = RingFile::create(&path, "disk", 1, 128).unwrap();
        drop((file, writers));
        next.writer(0).write(&record(7));
        assert_eq!(poll(&mut RingReader::open(&path).unwrap()), [record(7)]);
        assert!(!is_cut(&next));
    }
}
