//! The files that a server has its disks from: read at the start, and again when it is told to.

use super::{Objects, Settings};
use crate::answer::{Answer, Asker};
use crate::error::Error;
use crate::events::Happened;
use crate::files::{Found, Keeper, KeptDisks, Reread, reread};
use crate::objects::changes::Event;
use crate::objects::disk::Origin;
use crate::options::ServeOptions;
use crate::table::DiskTable;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// Disks that are kept have so long to be there before the server says that it is ready.
const OPEN: Duration = Duration::from_secs(10);

impl Objects {
    /// Serve the disks that are kept in this directory, and keep others there. What cannot be served
    /// is told, and does not keep others from it.
    pub fn keep_disks_in(&mut self, dir: &Path) -> Result<(), Error> {
        let kept = KeptDisks::open(dir).map_err(Error::Options)?;
        let found = kept.read();
        let keeper = Keeper::start(kept);
        self.keeper = Some(keeper.map_err(Error::io("cannot start a thread"))?);
        self.put_all(Vec::new(), found);
        let deadline = Instant::now() + OPEN;
        while !self.changing.is_empty() && self.wait_for_event(deadline) {
            self.turn();
        }
        Ok(())
    }

    /// Read the configuration again; what has changed is changed when that is done.
    pub fn reload(&mut self) {
        let Some(config) = self.config.clone() else {
            return;
        };
        let post = self.mail.post();
        let done = move |read| post.send(Event::Reread(Box::new(read)));
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
        let ServeOptions {
            disks,
            pools,
            nbd,
            api,
            kept,
            stop_timeout,
            ..
        } = match options {
            Ok(options) => options,
            Err(error) => return tracing::error!("{error}: nothing is changed"),
        };
        let settings = Settings {
            pools,
            nbd,
            api,
            kept,
        };
        if settings != self.settings {
            tracing::warn!(
                "changes of [pool], [nbd], api and disks-dir are seen when the server starts again"
            );
        }
        self.stop_timeout = stop_timeout;
        let listed = disks.into_iter().filter_map(|disk| disk.table);
        let listed: Vec<_> = listed.map(|table| *table).collect();
        let tables = listed.iter().chain(&found.disks);
        let mut stay: BTreeSet<_> = tables.map(|table| table.name.clone()).collect();
        // Of those it is not known what they are to be.
        stay.extend(found.problems.iter().map(|(name, _)| name.clone()));
        let goes = |name: &str, origin: &Origin| *origin != Origin::Request && !stay.contains(name);
        let disks = self.disks.iter();
        let gone = disks.filter(|disk| goes(disk.name(), &disk.origin));
        let gone: Vec<_> = gone.map(|disk| disk.name().to_owned()).collect();
        for name in gone {
            if let Ok(index) = self.find(&name) {
                self.remove(index, false, false, to_log(name));
            }
        }
        self.put_all(listed, found);
        tracing::info!("the configuration was read again");
        self.common.events.tell(Happened::Reloaded);
    }

    /// Let there be all these disks.
    fn put_all(&mut self, listed: Vec<DiskTable>, kept: Found) {
        for (_, problem) in kept.problems {
            tracing::error!("{problem}");
        }
        for table in listed {
            let asker = to_log(table.name.clone());
            self.put(table, Origin::Configuration, false, asker);
        }
        for table in kept.disks {
            let disks = self.disks.iter();
            let mut listed = disks.filter(|disk| disk.origin == Origin::Configuration);
            if listed.any(|disk| disk.name() == table.name) {
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
