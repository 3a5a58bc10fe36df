//! Resizes disks while requests are served.

use crate::common::{Ask, Guest};
use crate::surroundings::{image, open, uring, with};
use fathom_core::{Disk, DiskError, Op, Resize};
use fathom_storage::{Cache, MemoryDisk, NullDisk};
use proptest::prelude::*;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

const MIB: u64 = 1 << 20;

fn settled() -> Result<(), DiskError> {
    Ok(())
}

/// Resizes a disk that `guest` uses. Waits for the guest's requests when the disk shrinks.
fn resize(disk: &dyn Disk, guest: &Guest, size: u64) -> Result<u64, DiskError> {
    let settle = || {
        let settling = guest.worker().begin_settle();
        assert!(settling.wait(Instant::now() + fathom_testing::PATIENCE));
        Ok(())
    };
    disk.resize(&Resize {
        size: Some(size),
        shrink: true,
        settle: &settle,
    })
}

fn refusal(disk: &dyn Disk, size: Option<u64>, shrink: bool) -> String {
    let before = disk.info();
    let settle = &settled;
    let to = Resize {
        size,
        shrink,
        settle,
    };
    let error = disk.resize(&to).expect_err("it is refused");
    assert_eq!(disk.info(), before);
    error.to_string()
}

/// Makes a disk of one MiB of each kind that holds data, with its file, if it is in one.
fn kinds() -> Vec<(Arc<dyn Disk>, Option<tempfile::NamedTempFile>)> {
    let mut kinds: Vec<(Arc<dyn Disk>, Option<_>)> = Vec::new();
    for cache in Cache::ALL {
        let file = image(MIB);
        kinds.push((open(file.path(), with(cache)), Some(file)));
    }
    let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file in memory");
    file.as_file().set_len(MIB).expect("sized");
    kinds.push((open(file.path(), with(Cache::None)), Some(file)));
    let memory = MemoryDisk::new(MIB).expect("memory");
    kinds.push((Arc::new(memory), None));
    kinds
}

#[test]
fn sizes_that_no_disk_can_have_are_refused() {
    let mut kinds = kinds();
    kinds.push((Arc::new(NullDisk::new(MIB)), None));
    for (disk, file) in kinds {
        for (size, word) in [
            (0, "512"),
            (1, "multiple of 512"),
            (MIB + 100, "multiple of 512"),
            (u64::MAX, "exceed the largest size"),
            (1 << 63, "exceed the largest size"),
            (MIB - 512, "--shrink"),
        ] {
            let said = refusal(&*disk, Some(size), false);
            assert!(said.contains(word), "{size}: {said}");
        }
        match file {
            None => assert!(refusal(&*disk, None, true).contains("only disks in files")),
            // Only tmpfs supports files of that length.
            Some(file) if file.path().starts_with("/dev/shm") => {}
            Some(file) => {
                let said = refusal(&*disk, Some(i64::MAX as u64 & !511), false);
                assert!(said.contains("cannot resize"), "{said}");
                assert_eq!(file.as_file().metadata().expect("stat").len(), MIB);
            }
        }
    }
}

#[test]
fn what_somebody_else_has_added_to_a_file_is_not_lost() {
    let file = image(MIB);
    let disk = open(file.path(), with(Cache::None));
    file.as_file().set_len(3 * MIB).expect("longer");
    assert!(refusal(&*disk, Some(2 * MIB), false).contains("shrink"));
    assert_eq!(file.as_file().metadata().expect("stat").len(), 3 * MIB);
}

#[test]
fn a_disk_that_shrinks_waits_for_what_is_behind_its_end() {
    for (disk, file) in kinds() {
        let guest = std::cell::RefCell::new(Guest::new(disk.clone(), uring));
        let waited = Cell::new(false);
        let settle = || {
            waited.set(true);
            assert_eq!(disk.info().size, MIB / 2);
            let mut guest = guest.borrow_mut();
            assert_eq!(guest.write(MIB / 2, &[1; 512]), libc::EIO);
            assert_eq!(guest.write(MIB / 2 - 512, &[1; 512]), 0);
            if let Some(file) = &file {
                assert_eq!(file.as_file().metadata().expect("stat").len(), MIB);
            }
            Ok(())
        };
        let to = Resize {
            size: Some(MIB / 2),
            shrink: true,
            settle: &settle,
        };
        assert_eq!(disk.resize(&to).expect("smaller"), MIB / 2);
        assert!(waited.get());
        let never = || Err(DiskError::Refused("they do not end".into()));
        let to = Resize {
            size: Some(512),
            settle: &never,
            ..to
        };
        assert!(disk.resize(&to).is_err());
        assert_eq!(disk.info().size, MIB / 2);
        let mut guest = guest.into_inner();
        assert_eq!(guest.read(MIB / 2 - 512, 512), Ok(vec![1; 512]));
        if let Some(file) = &file {
            assert_eq!(file.as_file().metadata().expect("stat").len(), MIB / 2);
        }
        guest.detach();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Resize(u64),
    Write(u64, u64, u8),
    Zero(u64, u64, Op),
    Read(u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0u64..6144, 1u64..512);
    prop_oneof![
        (1u64..6144).prop_map(|sectors| Step::Resize(sectors * 512)),
        (place(), 1u8..).prop_map(|((at, n), byte)| Step::Write(at * 512, n * 512, byte)),
        (place(), prop::bool::ANY).prop_map(|((at, n), discards)| {
            let op = if discards {
                Op::Discard
            } else {
                Op::WriteZeroes
            };
            Step::Zero(at * 512, n * 512, op)
        }),
        place().prop_map(|(at, n)| Step::Read(at * 512, n * 512)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn a_disk_holds_what_was_written_within_its_ends(
        steps in prop::collection::vec(step(), 1..60),
    ) {
        for (disk, file) in kinds() {
            let mut guest = Guest::new(disk.clone(), uring);
            let mut model = vec![0u8; MIB as usize];
            for step in &steps {
                let len = model.len() as u64;
                match *step {
                    Step::Resize(size) => {
                        prop_assert_eq!(resize(&*disk, &guest, size).expect("resized"), size);
                        model.resize(size as usize, 0);
                        if let Some(file) = &file {
                            prop_assert_eq!(file.as_file().metadata().expect("stat").len(), size);
                        }
                    }
                    Step::Write(at, n, byte) => {
                        let errno = guest.write(at, &vec![byte; n as usize]);
                        prop_assert_eq!(errno, if at + n <= len { 0 } else { libc::EIO });
                        if errno == 0 {
                            model[at as usize..(at + n) as usize].fill(byte);
                        }
                    }
                    Step::Zero(at, n, op) => {
                        let (errno, _) = guest.run(Ask::new(op, at, n));
                        prop_assert_eq!(errno, if at + n <= len { 0 } else { libc::EIO });
                        if errno == 0 && op == Op::WriteZeroes {
                            model[at as usize..(at + n) as usize].fill(0);
                        } else if errno == 0 {
                            let now = guest.read(at, n).expect("read");
                            model[at as usize..(at + n) as usize].copy_from_slice(&now);
                        }
                    }
                    Step::Read(at, n) if at + n <= len => {
                        let part = model[at as usize..(at + n) as usize].to_vec();
                        prop_assert_eq!(guest.read(at, n), Ok(part));
                    }
                    Step::Read(at, n) => prop_assert_eq!(guest.read(at, n), Err(libc::EIO)),
                }
            }
            for at in (0..model.len()).step_by(1 << 19) {
                let part = &model[at..model.len().min(at + (1 << 19))];
                prop_assert!(guest.read(at as u64, part.len() as u64) == Ok(part.to_vec()));
            }
            guest.detach();
        }
    }
}
