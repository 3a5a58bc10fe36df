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

/// Running fios in a guest, one for each of some disks.
#[derive(Debug)]
pub struct Load {
    /// The kernel's names of the devices, for a shell.
    names: String,
    bytes: u64,
}

impl Load {
    /// Starts it on the disks of the machine with these ids. Every block of the first `bytes` of each
    /// is written once, `rate` blocks a second: slowly enough that what the test does happens in the
    /// middle, whatever the machine.
    ///
    /// # Panics
    /// When the guest does not answer.
    pub fn start(guest: &mut Guest, disks: &[&str], bytes: u64, rate: u32) -> Self {
        let devices = disks.iter().map(|disk| guest.device(disk).unwrap());
        let names: Vec<_> = devices
            .map(|device| device.trim_start_matches("/dev/").to_owned())
            .collect();
        let names = names.join(" ");
        // All at once: in a guest that is busy already, each further command takes long.
        let script = format!(
            "rm -f /tmp/load.*
             for name in {names}; do
                 (status=0
                 fio --filename=/dev/$name --rate_iops={rate} --verify_backlog=512 {options} \
                 >/tmp/load.$name.log 2>&1 || status=$?
                 echo $status >/tmp/load.$name.status) >/dev/null 2>&1 &
             done",
            options = options(bytes),
        );
        guest.check(&script, ANSWER).unwrap();
        Self { names, bytes }
    }

    /// Waits until it has written something on each disk.
    ///
    /// # Panics
    /// When nothing is written for a minute.
    pub fn wait_for_writes(&self, guest: &mut Guest) {
        self.wait_for("0", 300, guest);
    }

    /// Waits until it has written some more on each disk.
    ///
    /// # Panics
    /// When nothing is written for a minute.
    pub fn wait_for_more_writes(&self, guest: &mut Guest) {
        self.wait_for("$(writes)", 20, guest);
    }

    /// Until there are more writes than so many beyond those from which it is counted.
    fn wait_for(&self, from: &str, count: u32, guest: &mut Guest) {
        // The fifth number in a block device's stat is the writes done.
        let script = format!(
            "writes() {{ set -- $(cat /sys/block/$name/stat); echo $5; }}
            for name in {}; do
                before={from}
                for i in $(seq 300); do
                    [ $(writes) -gt $((before + {count})) ] && continue 2
                    sleep 0.2
                done
                cat /tmp/load.$name.log
                echo nothing is written to $name
                exit 1
            done",
            self.names
        );
        guest.check(&script, Duration::from_secs(120)).unwrap();
    }

    /// Checks that it still runs on all disks: what the test did happened in its middle.
    ///
    /// # Panics
    /// With fio's words when it has ended.
    pub fn expect_running(&self, guest: &mut Guest) {
        let script = format!(
            "for name in {}; do
                [ ! -e /tmp/load.$name.status ] || {{ tail -n 40 /tmp/load.$name.log; exit 1; }}
            done",
            self.names
        );
        guest.check(&script, ANSWER).unwrap();
    }

    /// Whether it has ended on some disk.
    ///
    /// # Panics
    /// When the guest does not answer.
    pub fn has_ended(&self, guest: &mut Guest) -> bool {
        let script = "ls /tmp/load.*.status 2>/dev/null || true";
        !guest.check(script, ANSWER).unwrap().is_empty()
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// With fio's words when it found a wrong block, or an error.
    pub fn finish(&self, guest: &mut Guest) {
        let script = format!(
            "for name in {}; do
                for i in $(seq 1000); do
                    [ -e /tmp/load.$name.status ] && break
                    sleep 0.2
                done
                [ -e /tmp/load.$name.status ] && [ $(cat /tmp/load.$name.status) = 0 ] && continue
                tail -n 40 /tmp/load.$name.log
                echo $name: in flight: $(cat /sys/block/$name/inflight)
                exit 1
            done",
            self.names
        );
        guest.check(&script, FINISH).unwrap();
    }

    /// Verifies every block of a disk once more with the host's own fio, straight on a raw image.
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
