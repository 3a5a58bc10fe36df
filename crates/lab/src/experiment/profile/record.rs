//! Recordings during a cell's work, in the guest and on the host at the same time: samples of the
//! CPUs, and waits for kernel locks if the kernel can trace them.

use std::path::Path;
use std::time::Duration;

use fathom_run::evidence::LockWait;
use fathom_run::folded::{QEMU, SERVER};
use fathom_run::{Folded, Side};

use super::components;
use super::fold::Folder;
use super::locks::{self, Waits};
use super::sampling::Sampling;
use crate::bed::GuestBed;
use crate::error::Result;
use crate::experiment::Yield;
use crate::guest::Guest;
use crate::perf::{InGuest, Modules, OnHost};

const SOON: Duration = Duration::from_secs(60);

/// perf on both sides. If recording fails on one side, the other side's results are still used.
pub struct Recorder {
    guest: Result<InGuest>,
    host: Result<OnHost>,
    /// `None` if the kernel cannot trace lock contention, or the user may not see it.
    guest_locks: Option<InGuest>,
    host_locks: Option<OnHost>,
}

impl Recorder {
    /// Starts to record; files are written to the directory `files`.
    pub fn start(bed: &mut GuestBed, files: &Path, sampling: Sampling) -> Recorder {
        let (samples, locks) = (sampling.recording(), locks::recording());
        let guest = &mut bed.guest;
        let told = guest.run(&locks::told_in_guest(), SOON);
        let told = told.is_ok_and(|output| output.status == 0);
        Recorder {
            guest_locks: told.then(|| InGuest::start(guest, &locks).ok()).flatten(),
            guest: InGuest::start(guest, &samples),
            host_locks: match locks::are_told() {
                true => OnHost::start(files, &locks).ok(),
                false => None,
            },
            host: OnHost::start(files, &samples),
        }
    }

    /// Stops both sides. No recording is printed before both have stopped, because printing is
    /// work, too.
    pub fn stop(self, bed: &mut GuestBed) -> Recorder {
        let guest = &mut bed.guest;
        Recorder {
            host: self.host.and_then(OnHost::stop),
            host_locks: self.host_locks.and_then(|perf| perf.stop().ok()),
            guest: self.guest.and_then(|perf| perf.stop(guest)),
            guest_locks: self.guest_locks.and_then(|perf| perf.stop(guest).ok()),
        }
    }

    /// Adds the results to a cell's yield, and writes them to its folder.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn tell(self, bed: &mut GuestBed, folder: &Path, found: &mut Yield) -> Result<()> {
        let mut known = vec![(bed.guest.pid(), QEMU)];
        if let Some(server) = &mut bed.server {
            known.push((server.process().pid(), SERVER));
        }
        let guest = &mut bed.guest;
        let modules = modules(guest);
        let mut stacks = Folder::new(Vec::new(), modules.clone());
        let told = self
            .guest
            .and_then(|perf| perf.print(guest, &mut |chunk| stacks.push(chunk)));
        keep(found, folder, Side::Guest, told, stacks.finish())?;
        let mut stacks = Folder::new(known, Modules::of_host());
        let told = self
            .host
            .and_then(|perf| perf.print(&mut |chunk| stacks.push(chunk)));
        keep(found, folder, Side::Host, told, stacks.finish())?;

        if let Some(perf) = self.guest_locks {
            let mut waits = Waits::new(modules);
            let told = perf.print(guest, &mut |chunk| waits.push(chunk));
            keep_locks(found, Side::Guest, told, waits.finish(Side::Guest));
        }
        if let Some(perf) = self.host_locks {
            let mut waits = Waits::new(Modules::of_host());
            let told = perf.print(&mut |chunk| waits.push(chunk));
            keep_locks(found, Side::Host, told, waits.finish(Side::Host));
        }
        Ok(())
    }
}

fn modules(guest: &mut Guest) -> Modules {
    let text = guest.run("cat /proc/modules", SOON);
    Modules::parse(&text.map(|output| output.text).unwrap_or_default())
}

/// A message from perf, if any, or why recording has failed.
type Told = Result<Option<String>>;

fn problem(found: &mut Yield, side: Side, told: Told) {
    let words = told.unwrap_or_else(|error| error.to_string().lines().next().map(str::to_owned));
    let lines = words.map(|words| format!("{}: {words}", side.name()));
    found.problems.extend(lines);
}

fn keep(found: &mut Yield, folder: &Path, side: Side, told: Told, folded: Folded) -> Result<()> {
    problem(found, side, told);
    if !folded.is_empty() {
        folded.save(&folder.join(side.file()))?;
    }
    found.measures.extend(components::measures(&folded, side));
    Ok(())
}

fn keep_locks(found: &mut Yield, side: Side, told: Told, locks: Vec<LockWait>) {
    problem(found, side, told);
    let evidence = found.evidence.get_or_insert_default();
    evidence.locks.extend(locks);
}
