//! Tests of the load generator against a device based on the `virtio-queue` and `vhost` crates,
//! with and without faults.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fathom_load::{Error, Load, Op, Options, Report, Rw, Target, VhostUser, Wait};

#[path = "support/mod.rs"]
mod support;

use support::device::{Device, Fault};
use support::{EVENT_IDX, INDIRECT, LOG_ALL, Server};

/// A server with its device and socket.
struct Bed {
    socket: PathBuf,
    device: Arc<Device>,
    server: Server,
    /// Declared last, so that it is dropped last: stopping the server needs its socket.
    _dir: tempfile::TempDir,
}

impl Bed {
    fn new(device: Device) -> Bed {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("disk.sock");
        let device = Arc::new(device);
        Bed {
            server: Server::start(&socket, device.clone()),
            socket,
            device,
            _dir: dir,
        }
    }

    fn faulty(fault: Fault, nth: u32) -> Bed {
        Bed::new(Device::new(Some((fault, nth))))
    }

    fn run(&self, load: Load, change: impl FnOnce(&mut VhostUser)) -> Result<Report, Error> {
        let mut server = VhostUser::new(&self.socket);
        change(&mut server);
        let options = Options {
            target: Target::VhostUser(server),
            load,
        };
        fathom_load::run(&options, &mut |_| {})
    }

    fn error(&self, load: Load) -> String {
        self.run(load, |_| {}).unwrap_err().to_string()
    }
}

/// Returns a mixed load with verification, of `n` requests per queue.
fn mixed(n: u64) -> Load {
    Load {
        rw: Rw::RandRw,
        iodepth: 8,
        runtime: None,
        ramp: Duration::ZERO,
        number_ios: Some(n),
        verify: true,
        timeout: Duration::from_secs(60),
        ..Load::default()
    }
}

fn requests(report: &Report) -> u64 {
    report.operations.iter().map(|d| d.ios).sum()
}

#[test]
fn every_kind_of_ring_carries_every_kind_of_request() {
    for (indirect, event_idx, wait) in [
        (true, true, Wait::Interrupt),
        (true, false, Wait::Interrupt),
        (false, true, Wait::Interrupt),
        (false, false, Wait::Interrupt),
        (true, true, Wait::Poll),
        (false, false, Wait::Poll),
    ] {
        let bed = Bed::new(Device::new(None));
        let load = Load {
            rwmixtrim: 5,
            rwmixzero: 5,
            fsync: 10,
            queues: 2,
            ..mixed(3000)
        };
        let report = bed
            .run(load, |s| {
                s.indirect = indirect;
                s.event_idx = event_idx;
                s.wait = wait;
            })
            .unwrap();
        assert_eq!(requests(&report), 6000);
        for op in Op::ALL {
            assert!(report.operation(op).is_some(), "{op:?}");
        }
        let verified = report.verify.unwrap();
        let read = report.operation(Op::Read).unwrap().ios;
        assert!(verified.checked > read / 2, "{verified:?}");
        // The device has executed all counted requests, and also those of the final read-back.
        let executed = u64::from(bed.device.executed.load(Ordering::Relaxed));
        assert!(executed > 6000, "{executed}");
    }
}

#[test]
fn indices_wrap_around_and_no_wake_up_is_lost() {
    for (depth, event_idx, wait) in [
        (1, true, Wait::Interrupt),
        (3, false, Wait::Interrupt),
        (32, true, Wait::Poll),
    ] {
        let bed = Bed::new(Device::new(None));
        let load = Load {
            iodepth: depth,
            bs: 512,
            verify: false,
            ..mixed(70_000)
        };
        let report = bed
            .run(load, |s| {
                s.queue_size = Some(32);
                s.event_idx = event_idx;
                s.wait = wait;
            })
            .unwrap();
        assert_eq!(requests(&report), 70_000);
        if (wait, event_idx) == (Wait::Interrupt, true) {
            assert!(report.calls_per_request < 1.1, "{report}");
        }
        if wait == Wait::Poll {
            assert!(report.calls_per_request < 0.001, "{report}");
        }
    }
}

#[test]
fn a_driver_that_should_sleep_does_not_spin() {
    // The server has made the call eventfd non-blocking, which affects both sides. The driver must
    // undo that.
    let bed = Bed::new(Device::new(None));
    bed.run(mixed(1000), |_| {}).unwrap();
    let calls = bed.server.seen.calls.lock().unwrap();
    let flags = rustix::fs::fcntl_getfl(&*calls[0]).unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
}

#[test]
fn segments_odd_sizes_and_full_rings_work() {
    for (bs, segment, depth, ring) in [
        (512, None, 32, Some(32)),
        (12288, Some(4096), 4, None),
        (10240, Some(4096), 3, Some(4)),
        (65536, Some(512), 2, None),
    ] {
        let bed = Bed::new(Device::new(None));
        let load = Load {
            bs,
            iodepth: depth,
            ..mixed(500)
        };
        let change = |s: &mut VhostUser| {
            s.segment_size = segment;
            s.queue_size = ring;
        };
        let report = bed.run(load, change).unwrap();
        assert_eq!(requests(&report), 500, "{bs} {segment:?}");
    }
}

#[test]
fn wrong_contents_are_found() {
    for (fault, word) in [
        (Fault::LoseWrite, "found generation"),
        (Fault::TearWrite, "torn"),
        (Fault::MisplaceWrite, "found"),
        (Fault::SkipRead, "found"),
    ] {
        let bed = Bed::faulty(fault, 150);
        // Use few blocks, so that each is written repeatedly.
        let load = Load {
            size: Some(32 * 4096),
            ..mixed(20_000)
        };
        let error = bed.error(load);
        assert!(error.starts_with("verify: block "), "{fault:?}: {error}");
        assert!(error.contains(word), "{fault:?}: {error}");
    }
}

#[test]
fn read_that_transfers_nothing_is_found_in_any_buffer() {
    // The only slot has written the block before, so its buffer has the right data.
    let bed = Bed::faulty(Fault::SkipRead, 1);
    let load = Load {
        rw: Rw::RandWrite,
        iodepth: 1,
        ..mixed(1)
    };
    let error = bed.error(load);
    assert!(error.contains("found no data"), "{error}");
}

#[test]
fn a_write_lost_at_the_very_end_is_found_by_reading_back() {
    let bed = Bed::faulty(Fault::LoseWrite, 100);
    let load = Load {
        rw: Rw::Write,
        ..mixed(100)
    };
    let error = bed.error(load);
    assert!(error.contains("block 99"), "{error}");
    assert!(error.contains("found zeroes"), "{error}");
}

#[test]
fn broken_rings_are_found() {
    for (fault, text) in [
        (Fault::IoError, "failed: the device says IOERR"),
        (Fault::NoStatus, "completed without a status"),
        (Fault::Twice, "in flight"),
        (Fault::StrangeHead, "heads no request"),
        (Fault::LongUsed, "were writable"),
    ] {
        let bed = Bed::faulty(fault, 77);
        let error = bed.error(mixed(2000));
        assert!(error.contains(text), "{fault:?}: {error}");
    }
}

#[test]
fn a_lost_interrupt_is_told_from_a_lost_request() {
    for (fault, words) in [
        (Fault::NoInterrupt, "sent no interrupt"),
        (Fault::LoseRequest, "the server has not answered"),
    ] {
        let bed = Bed::faulty(fault, 50);
        let load = Load {
            // On a busy machine, the device may need some time for the earlier requests.
            timeout: Duration::from_secs(5),
            ..mixed(1000)
        };
        let error = bed.error(load);
        assert!(error.contains(words), "{fault:?}: {error}");
    }
}

#[test]
fn errors_can_be_counted_instead() {
    let bed = Bed::faulty(Fault::IoError, 10);
    let load = Load {
        continue_on_error: true,
        verify: false,
        ..mixed(1000)
    };
    let report = bed.run(load, |_| {}).unwrap();
    assert_eq!(report.errors, 100);
    assert_eq!(requests(&report), 900);
}

#[test]
fn a_single_mark_missing_in_the_dirty_log_is_found() {
    let bed = Bed::new(Device::new(None));
    let report = bed.run(mixed(3000), |s| s.log = true).unwrap();
    assert!(report.dirty_log_pages.unwrap() > 1000);
    let bed = Bed::faulty(Fault::NoLog, 1000);
    let load = Load {
        rw: Rw::RandRead,
        ..mixed(1500)
    };
    let error = bed.run(load, |s| s.log = true).unwrap_err().to_string();
    assert!(error.starts_with("dirty log: page"), "{error}");
}

#[test]
fn the_load_survives_its_server() {
    const OFTEN: u32 = 400;
    for queues in [1, 2] {
        let bed = Bed::faulty(Fault::HangUp, OFTEN);
        let load = Load {
            queues,
            ..mixed(4000)
        };
        let report = bed
            .run(load, |s| {
                s.inflight = true;
                s.reconnect = Some(Duration::from_secs(60));
            })
            .unwrap();
        assert_eq!(requests(&report), 4000 * u64::from(queues));
        assert!(report.reconnects > 0);
        let seen = &bed.server.seen;
        let sessions = seen.sessions.load(Ordering::Relaxed);
        // The number of sessions is at most the number of hang-ups plus one. Some sessions are not
        // counted as reconnects, because the server hung up again before they were complete.
        let most = 1 + bed.device.count.load(Ordering::Relaxed) / OFTEN;
        assert!((6..=most).contains(&sessions), "{sessions} of {most}");
        assert_eq!(seen.inflight.load(Ordering::Relaxed), sessions);
    }
}

#[test]
fn without_reconnect_a_hang_up_is_an_error() {
    let bed = Bed::faulty(Fault::HangUp, 400);
    let error = bed.error(mixed(4000));
    assert!(
        error.contains("the server closed the connection"),
        "{error}"
    );
}

#[test]
fn a_later_run_checks_what_an_earlier_one_wrote() {
    let bed = Bed::new(Device::new(None));
    let dir = tempfile::tempdir().unwrap();
    let load = Load {
        rw: Rw::Write,
        verify_state: Some(dir.path().join("state")),
        ..mixed(100)
    };
    bed.run(load.clone(), |_| {}).unwrap();
    let check = Load {
        verify_only: true,
        queues: 3,
        ..load.clone()
    };
    let first = bed.run(check.clone(), |_| {}).unwrap().verify.unwrap();
    assert_eq!((first.written, first.checked), (0, 100));
    // Another run overwrites the first block, unknown to the state file.
    let foreign = Load {
        verify_state: None,
        number_ios: Some(1),
        ..load
    };
    bed.run(foreign, |_| {}).unwrap();
    let error = bed.error(check);
    assert!(error.contains("block 0 "), "{error}");
    assert!(error.contains("data of another run"), "{error}");
}

#[test]
fn what_the_server_lacks_is_said() {
    for (missing, change, text) in [
        (
            INDIRECT,
            (|_| {}) as fn(&mut VhostUser),
            "INDIRECT_DESC: use --no-indirect",
        ),
        (EVENT_IDX, |_| {}, "EVENT_IDX: use --no-event-idx"),
        (LOG_ALL, |s| s.log = true, "LOG_ALL"),
    ] {
        let bed = Bed::new(Device::without(missing));
        let error = bed.run(mixed(10), change).unwrap_err().to_string();
        assert!(error.contains("does not offer"), "{error}");
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn options_that_do_not_fit_the_disk_are_refused() {
    let bed = Bed::new(Device::new(None));
    let beyond = Load {
        offset: 2 << 20,
        ..mixed(1)
    };
    assert!(bed.error(beyond).contains("--offset"));
    let long = Load {
        size: Some(2 << 20),
        ..mixed(1)
    };
    assert!(bed.error(long).contains("pass the disk's end"));
    let many = Load {
        queues: 5,
        ..mixed(1)
    };
    assert!(bed.error(many).contains("the server has 4"));
    let few = Load {
        size: Some(8 * 4096),
        ..mixed(1)
    };
    assert!(bed.error(few).contains("8 blocks per queue"));
}
