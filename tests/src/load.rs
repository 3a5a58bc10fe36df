//! A verified load in a guest.
//!
//! fio writes blocks with checksums, reads them back meanwhile, and reads them once more at the end
//! of each round. Rounds follow each other until the test ends the load, however long the test
//! takes.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fathom_lab::{Guest, program};

use crate::run_command;

/// Under emulation, a few thousand requests take seconds, and minutes on a busy machine.
const FINISH: Duration = Duration::from_secs(300);
const ANSWER: Duration = Duration::from_secs(60);

/// Number of parts of a disk.
///
/// Each round writes one part, so that a test waits for few writes when it ends the load, and
/// images grow for several rounds.
const PARTS: u64 = 4;

/// A verified load in a guest: each round runs fio on each disk, until `finish` is called.
#[derive(Debug)]
pub struct Load {
    /// The kernel's names of the devices, separated by spaces.
    names: String,
    bytes: u64,
}

/// The writes of a finished load to its disks.
#[derive(Debug)]
pub struct Written {
    bytes: u64,
    /// Number of rounds.
    rounds: u64,
}

impl Load {
    /// Starts the load on the disks with these ids.
    ///
    /// A round writes each block of one part of each disk once, at `rate` blocks per second. Order
    /// and contents differ from those of earlier rounds. The parts together are the first `bytes`
    /// of a disk.
    ///
    /// # Panics
    /// If the guest does not reply.
    pub fn start(guest: &mut Guest, disks: &[&str], bytes: u64, rate: u32) -> Self {
        let devices = disks.iter().map(|disk| guest.device(disk).unwrap());
        let names: Vec<_> = devices
            .map(|device| device.trim_start_matches("/dev/").to_owned())
            .collect();
        let names = names.join(" ");
        // A single command starts everything: in a busy guest, each further command takes long.
        let script = format!(
            "rm -f /tmp/load.*
             (round=0
             while [ ! -e /tmp/load.finish ] && [ ! -e /tmp/load.failed ]; do
                 round=$((round + 1))
                 echo $round >/tmp/load.round
                 offset=$((round % {PARTS} * {part}))
                 for name in {names}; do
                     fio --filename=/dev/$name --rate_iops={rate} --verify_backlog=512 {options} \
                     --randseed=$round --offset=$offset >/tmp/load.$name.log 2>&1 || echo $name >>/tmp/load.failed &
                 done
                 wait
             done
             touch /tmp/load.ended) >/dev/null 2>&1 &",
            options = options(bytes),
            part = bytes / PARTS,
        );
        guest.check(&script, ANSWER).unwrap();
        Self { names, bytes }
    }

    /// Waits until the load has written some blocks on each disk.
    ///
    /// # Panics
    /// If too little is written in five minutes.
    pub fn wait_for_writes(&self, guest: &mut Guest) {
        self.wait_for("0", 300, guest);
    }

    /// Waits until the load has written some more blocks on each disk.
    ///
    /// # Panics
    /// If too little is written in five minutes.
    pub fn wait_for_more_writes(&self, guest: &mut Guest) {
        self.wait_for("$(writes)", 20, guest);
    }

    /// Waits until each disk has had more than `count` writes beyond `from`.
    fn wait_for(&self, from: &str, count: u32, guest: &mut Guest) {
        // The fifth number in a block device's stat is the number of completed writes.
        let script = format!(
            "writes() {{ set -- $(cat /sys/block/$name/stat); echo $5; }}
            for name in {}; do
                before={from}
                for i in $(seq 1300); do
                    [ $(writes) -gt $((before + {count})) ] && continue 2
                    sleep 0.2
                done
                cat /tmp/load.$name.log
                echo too little is written to $name
                exit 1
            done",
            self.names
        );
        guest.check(&script, FINISH).unwrap();
    }

    /// Ends the load after its present round, and waits for the end.
    ///
    /// # Panics
    /// With fio's output if a block is wrong, or if fio has reported an error.
    pub fn finish(&self, guest: &mut Guest) -> Written {
        let script = format!(
            "touch /tmp/load.finish
            for i in $(seq 1300); do
                [ -e /tmp/load.ended ] && break
                sleep 0.2
            done
            if [ -e /tmp/load.ended ] && [ ! -e /tmp/load.failed ]; then
                cat /tmp/load.round
                exit 0
            fi
            for name in {}; do
                tail -n 40 /tmp/load.$name.log
                echo $name: in flight: $(cat /sys/block/$name/inflight)
            done
            exit 1",
            self.names
        );
        let rounds = guest.check(&script, FINISH).unwrap();
        Written {
            bytes: self.bytes,
            rounds: rounds.trim().parse().unwrap(),
        }
    }
}

impl Written {
    /// Verifies every block of a disk once more with the host's own fio, directly on a raw image.
    ///
    /// # Panics
    /// With fio's output if a block is wrong.
    pub fn verify_on_host(&self, image: &Path) {
        // The last round of each part.
        for round in (1..=self.rounds).rev().take(PARTS as usize) {
            let mut command = Command::new(program("fio").unwrap());
            command.arg("--filename").arg(image).arg("--verify_only");
            command.arg(format!("--randseed={round}"));
            command.arg(format!("--offset={}", round % PARTS * (self.bytes / PARTS)));
            command.args(options(self.bytes).split_whitespace());
            let ended = run_command(command, FINISH);
            assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
        }
    }
}

/// Returns the options that writing and verification have in common.
///
/// The part and the seed, which gives order and contents, are added to these options. Without
/// norandommap a round writes every block of its part exactly once, so the last state is known.
fn options(bytes: u64) -> String {
    format!(
        "--name=load --rw=randwrite --bs=4k --size={part} --ioengine=libaio --iodepth=16 \
         --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 \
         --verify_state_save=0",
        part = bytes / PARTS,
    )
}
