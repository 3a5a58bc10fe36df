//! A verified load in a guest: fio writes blocks that carry checksums, reads them back while it
//! goes on, and once more at its end.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fathom_lab::{Guest, program};

use crate::run_command;

/// Under emulation a few thousand requests take seconds; on a loaded machine, minutes.
const FINISH: Duration = Duration::from_secs(300);
const ANSWER: Duration = Duration::from_secs(60);

/// A running fio in a guest.
#[derive(Debug)]
pub struct Load {
    bytes: u64,
}

impl Load {
    /// Starts it on a block device of the guest. Every block of the first `bytes` is written once.
    ///
    /// # Panics
    /// When the guest does not answer.
    pub fn start(guest: &mut Guest, device: &str, bytes: u64) -> Self {
        let options = options(bytes);
        let name = device.trim_start_matches("/dev/");
        // Slow enough that what the test does happens in the middle, whatever the machine.
        let script = format!(
            "rm -f /tmp/load.*
             echo {name} >/tmp/load.device
             (fio --filename={device} --rate_iops=1500 --verify_backlog=512 {options} \
             >/tmp/load.log 2>&1; echo $? >/tmp/load.status) >/dev/null 2>&1 &"
        );
        guest.check(&script, ANSWER).unwrap();
        Self { bytes }
    }

    /// Waits until it has written something.
    ///
    /// # Panics
    /// When nothing is written for a minute.
    pub fn wait_for_writes(&self, guest: &mut Guest) {
        // The fifth number in a block device's stat is the writes done.
        let script = "writes() { set -- $(cat /sys/block/$(cat /tmp/load.device)/stat); echo $5; }
            enough=$(($(writes) + 300))
            for i in $(seq 300); do
                [ $(writes) -gt $enough ] && exit 0
                sleep 0.2
            done
            cat /tmp/load.log
            exit 1";
        guest.check(script, Duration::from_secs(120)).unwrap();
    }

    /// Checks that it still runs: what the test did happened in its middle.
    ///
    /// # Panics
    /// When it has ended.
    pub fn expect_running(&self, guest: &mut Guest) {
        guest
            .check(
                "[ ! -e /tmp/load.status ] || { cat /tmp/load.log; exit 1; }",
                ANSWER,
            )
            .unwrap();
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// With fio's words when it found a wrong block, or an error.
    pub fn finish(&self, guest: &mut Guest) {
        let script = "for i in $(seq 1000); do
                [ -e /tmp/load.status ] && break
                sleep 0.2
            done
            tail -n 40 /tmp/load.log
            [ -e /tmp/load.status ] && exit $(cat /tmp/load.status)
            echo still running, in flight: $(cat /sys/block/$(cat /tmp/load.device)/inflight)
            exit 1";
        guest.check(script, FINISH).unwrap();
    }

    /// Verifies every block once more with the host's own fio, straight on the image.
    ///
    /// # Panics
    /// With fio's words when a block is wrong.
    pub fn verify_on_host(&self, image: &Path) {
        let mut command = Command::new(program("fio").unwrap());
        command.arg("--filename").arg(image).arg("--verify_only");
        command.args(options(self.bytes).split_whitespace());
        let ended = run_command(command, FINISH);
        assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
    }
}

/// What both runs must agree on. The same seed gives the same order; norandommap is not given, so
/// that every block is written exactly once and the last state is known.
fn options(bytes: u64) -> String {
    format!(
        "--name=load --rw=randwrite --bs=4k --size={bytes} --ioengine=libaio --iodepth=16 \
         --direct=1 --randseed=7 --verify=crc32c --verify_fatal=1 --do_verify=1 \
         --verify_state_save=0"
    )
}
