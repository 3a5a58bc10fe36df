//! The files that a server has its disks from: read at the start, and again when it is told to.

use super::{Book, Origin, Settings};
use crate::answer::{Answer, Asker};
use crate::error::Error;
use crate::events::Happened;
use crate::files::{Found, Keeper, KeptDisks, Reread, reread};
use crate::options::DiskOptions;
use crate::table::DiskTable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// Disks that are kept have so long to be there before the server says that it is ready.
const OPEN: Duration = Duration::from_secs(10);

impl Book {
    /// Serve the disks that are kept in this directory, and keep others there. What cannot be served
    /// is told, and does not keep others from it.
    pub fn keep_disks_in(&mut self, dir: &Path) -> Result<(), Error> {
        let kept = KeptDisks::open(dir).map_err(Error::Options)?;
        let found = kept.read();
        self.start_keeper(kept)?;
        let listed = self.origins.keys().cloned().collect();
        self.put_all(Vec::new(), found, &listed);
        Ok(())
    }

    /// Serve the disks that the configuration lists, of a host that has none yet. What cannot be
    /// served is told, and does not keep others from it.
    pub fn begin(&mut self, disks: &[DiskOptions]) {
        let tables = disks.iter().filter_map(|disk| disk.table.as_deref());
        let listed: Vec<_> = tables.cloned().collect();
        let names = listed.iter().map(|table| table.name.clone()).collect();
        self.put_all(listed, Found::default(), &names);
    }

    /// Until all disks are there, or long enough.
    pub fn wait_for_coming(&mut self) {
        let deadline = Instant::now() + OPEN;
        while !self.is_settled() && self.wait_for_event(deadline) {
            self.turn();
        }
    }

    /// False: none has come until `deadline`.
    fn wait_for_event(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let Some(left) = Timespec::try_from(left).ok().filter(|_| !left.is_zero()) else {
            return false;
        };
        let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds: Vec<_> = self.events().into_iter().map(input).collect();
        let _ = poll(&mut fds, Some(&left));
        true
    }

    pub(super) fn start_keeper(&mut self, kept: KeptDisks) -> Result<(), Error> {
        let failed = Error::io("cannot start a thread");
        self.kept = Some(kept.lock().map_err(&failed)?);
        self.keeper = Some(Keeper::start(kept).map_err(failed)?);
        Ok(())
    }

    /// Read the configuration again; what has changed is changed when that is done.
    pub fn reload(&mut self) {
        let Some(config) = self.config.clone() else {
            return;
        };
        let post = self.mail.post();
        let done = move |read| post.send(Box::new(|book: &mut Book| book.take_in_reread(read)));
        if let Err(error) = reread(config, self.keeper.as_ref(), done) {
            tracing::error!("the configuration is not read again: cannot start a thread: {error}");
            self.reloaded = true;
        }
    }

    /// Whether a reload has ended since this was asked last, well or badly.
    pub fn take_reloaded(&mut self) -> bool {
        std::mem::take(&mut self.reloaded)
    }

    /// Do what has changed in the configuration.
    pub(super) fn take_in_reread(
        &mut self,
        Reread {
            options,
            kept: found,
        }: Reread,
    ) {
        self.reloaded = true;
        let options = match options {
            Ok(options) => options,
            Err(error) => return tracing::error!("{error}: nothing is changed"),
        };
        if Settings::of(&options) != self.settings {
            tracing::warn!(
                "changes of [pool], [nbd], [tenants], api and disks-dir are seen when the server starts again"
            );
        }
        self.stop_timeout = options.stop_timeout;
        self.host.set_stop_timeout(options.stop_timeout);
        let disks = options.disks.into_iter();
        let listed: Vec<_> = disks
            .filter_map(|disk| disk.table)
            .map(|table| *table)
            .collect();
        let tables = listed.iter().chain(&found.disks);
        let mut stay: BTreeSet<_> = tables.map(|table| table.name.clone()).collect();
        // Of those it is not known what they are to be.
        stay.extend(found.problems.iter().map(|(name, _)| name.clone()));
        let goes = |(name, origin): &(&String, &Origin)| {
            **origin != Origin::Request && !stay.contains(*name)
        };
        let gone = self.origins.iter().filter(goes);
        let gone: Vec<_> = gone.map(|(name, _)| name.clone()).collect();
        for name in gone {
            self.remove(name.clone(), false, false, to_log(name));
        }
        let names = listed.iter().map(|table| table.name.clone()).collect();
        self.put_all(listed, found, &names);
        tracing::info!("the configuration was read again");
        self.events.tell(Happened::Reloaded);
    }

    /// Let there be all these disks. `names`: those that the configuration lists.
    fn put_all(&mut self, listed: Vec<DiskTable>, kept: Found, names: &BTreeSet<String>) {
        for (_, problem) in kept.problems {
            tracing::error!("{problem}");
        }
        for table in listed {
            let asker = to_log(table.name.clone());
            self.put(table, Origin::Configuration, false, asker);
        }
        for table in kept.disks {
            if names.contains(&table.name) {
                let name = table.name;
                tracing::error!("disk '{name}' is listed by the configuration, and kept, too");
                continue;
            }
            let asker = to_log(table.name.clone());
            self.put(table.clone(), Origin::Kept(Box::new(table)), false, asker);
        }
    }
}

/// Nobody but the log waits for the answer.
fn to_log(name: String) -> Asker {
    Box::new(move |answer: Answer| {
        if let Err(refusal) = answer {
            tracing::error!("disk '{name}': {refusal}");
        }
    })
}
