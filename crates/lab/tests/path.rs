//! The experiment `path`, small: functions of the kernel that a request must come by, in their
//! order, in this machine's stacks and in a guest's.

mod support;

use std::ops::Range;

use fathom_lab::experiment::Context;
use fathom_run::{Crossing, Handed, RequestPath, Side};
use fathom_testing::{decide, outrank_other_programs};
use support::value;

const REQUESTS: u64 = 60;
/// Possible numbers of counted requests. A program that opens a disk or a file may read it first,
/// and the kernel's threads work for all programs. On a busy device, a thread of another program
/// may hand over one of our requests, which is then not counted.
const SEEN: Range<u64> = REQUESTS * 9 / 10..2 * REQUESTS;

/// A cell's path, and a measure of it by its name.
fn follow(settings: &[(&str, &str)]) -> (RequestPath, impl Fn(&str) -> f64) {
    // A recording of a busy machine takes minutes to read at an ordinary priority.
    outrank_other_programs();
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    let requests = REQUESTS.to_string();
    let settings = [settings, &[("requests", &*requests)]].concat();
    let (plan, cells) = support::run_in(&dir, &Context::default(), "path", &settings);
    let path = RequestPath::load(&dir, &plan.cells[0]).unwrap();
    let [cell] = <[_; 1]>::try_from(cells).unwrap();
    assert_eq!(cell.problems, [""; 0]);
    (path.unwrap(), move |name: &str| value(&cell, name))
}

/// Each of these is in the device's most frequent stack, from the outside in; others may be between
/// them.
fn comes_by(one: &Handed, functions: &[&str]) {
    let mut frames = one.stacks[0].frames.iter();
    for function in functions {
        let is_here = frames.any(|frame| frame.contains(function));
        assert!(is_here, "{function} is not, or not there: {one:#?}");
    }
}

#[test]
fn a_read_goes_from_the_system_call_to_the_driver() {
    decide(|| {
        let (path, value) = follow(&[("technology", "bare"), ("of", "block")]);
        // The thread itself calls the driver, except on a busy device, where another thread may
        // call it.
        let (first, disk) = (&path.devices[0], path.devices.last().unwrap());
        assert_eq!(disk.side, Side::Host);
        assert!(SEEN.contains(&disk.requests), "{disk:?}");
        assert!(
            std::path::Path::new("/sys/block")
                .join(&disk.device)
                .exists()
        );
        assert!(first.stacks[0].thread.starts_with("fio"), "{path:?}");
        comes_by(first, &["pread", "entry_SYSCALL_64", "vfs_read", "blk_"]);
        comes_by(disk, &["blk_mq", "blk_mq_start_request"]);
        assert!(value("host.frames") >= 4.0);
        // Each read is a system call.
        assert!(value("host.calls") >= 1.0);
        assert!(path.between.iter().all(|one| one.what != Crossing::Exits));
    });
}

/// The mean of the device has requests in it that are not the benchmark's: fio's program may be
/// read from the same disk.
#[test]
fn device_takes_less_time_than_a_read() {
    decide(|| {
        let (_, value) = follow(&[("technology", "bare"), ("of", "block")]);
        let (device, request) = (value("host.device"), value("request"));
        assert!(device < request, "{device} {request}");
    });
}

#[test]
fn a_guests_read_goes_through_two_kernels() {
    decide(|| {
        let (path, value) = follow(&[("technology", "tcg"), ("of", "block"), ("disk", "qemu")]);
        let [first, .., last] = &path.devices[..] else {
            panic!("{path:#?}");
        };
        let driver = path.devices.iter().rfind(|one| one.side == Side::Guest);
        let driver = driver.unwrap();
        assert!(path.devices.iter().all(|one| SEEN.contains(&one.requests)));
        // The program's thread goes as far as the disk's scheduler, if it has one.
        assert!(first.stacks[0].thread.starts_with("fio"), "{first:?}");
        comes_by(first, &["entry_SYSCALL_64", "vfs_read", "blk_mq"]);
        comes_by(
            driver,
            &[
                "blk_mq",
                "virtio_queue_rq [virtio_blk.ko]",
                "blk_mq_start_request",
            ],
        );
        assert_eq!(last.side, Side::Host);
        assert!(last.stacks[0].thread.starts_with("qemu: "), "{last:?}");
        comes_by(
            last,
            &["entry_SYSCALL_64", "io_uring", "blk_mq_start_request"],
        );
        // The time of the host's device is a part of the time of the guest's device.
        assert!(value("host.device") < value("guest.device"));
        assert!(value("guest.device") < value("request"));
        assert!(value("guest.calls") >= 1.0 && value("host.switches") > 0.0);
    });
}

#[test]
fn a_packet_goes_to_the_bridges_other_port() {
    // (Seen once on a busy machine: half of the packets.)
    decide(|| {
        let (path, _) = follow(&[("technology", "container"), ("of", "packet")]);
        let told: Vec<_> = path.devices.iter().map(|one| one.device.as_str()).collect();
        assert_eq!(told, ["eth0", "port2"]);
        // The number is wrong if all packets are counted twice, or half of them not at all.
        let sent = path.devices[0].requests;
        assert!((REQUESTS / 2 + 1..2 * REQUESTS).contains(&sent), "{sent}");
        comes_by(
            &path.devices[0],
            &["entry_SYSCALL_64", "udp_sendmsg", "__dev_queue_xmit"],
        );
        comes_by(&path.devices[1], &["br_handle_frame", "__dev_queue_xmit"]);
    });
}
