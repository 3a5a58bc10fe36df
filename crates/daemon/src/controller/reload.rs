//! Definitions of disks, which are read at the server's start and at each reload.

use super::places::{places, specs};
use super::{Controller, Settings};
use crate::files::{Keeper, KeptDisks, Reread, reread};
use fathom_control::{Event, Found, without_conflicts};
use fathom_host::Error;
use fathom_host::options::{DiskOptions, ServeOptions};
use fathom_metrics::Happened;
use fathom_units::cause;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::path::Path;
use std::time::{Duration, Instant};

/// Time within which all disks should be served before the server reports that it is ready.
const OPEN: Duration = Duration::from_secs(10);

impl Controller {
    /// Serves the disks of these definitions, and stores new ones in `kept`. A disk that cannot be
    /// served is logged, and the server tries again.
    pub fn begin(
        &mut self,
        options: &ServeOptions,
        kept: Option<KeptDisks>,
        found: Found,
    ) -> Result<(), Error> {
        kept.map_or(Ok(()), |kept| self.start_keeper(kept))?;
        self.take_definitions(&options.disks, found);
        Ok(())
    }

    /// Waits until all disks are served, or a timeout has passed.
    pub fn wait_for_coming(&mut self) {
        let deadline = Instant::now() + OPEN;
        while !self.is_settled() && self.wait_for_event(deadline) {
            self.turn();
        }
    }

    /// False: no event has arrived until `deadline`.
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

    /// Reads the configuration and `disks-dir` again; disks change when that is done.
    pub fn reload(&mut self) {
        let Some(config) = self.config.clone() else {
            return;
        };
        let post = self.mail.post();
        let done = move |read| {
            post.send(Box::new(|controller: &mut Controller| {
                controller.apply_reread(read)
            }))
        };
        if let Err(error) = reread(config, self.keeper.as_ref(), done) {
            tracing::error!(
                "configuration: not read again: cannot start a thread: {}",
                cause(error)
            );
            self.reloaded = true;
        }
    }

    /// Whether a reload has ended since the last call.
    pub fn take_reloaded(&mut self) -> bool {
        std::mem::take(&mut self.reloaded)
    }

    /// Changes what has changed in the configuration.
    fn apply_reread(
        &mut self,
        Reread {
            options,
            kept: found,
        }: Reread,
    ) {
        self.reloaded = true;
        let options = match options {
            Ok(options) => options,
            Err(error) => {
                return tracing::error!(
                    "{error}; the configuration was not reloaded, and no disk was changed"
                );
            }
        };
        if Settings::of(&options) != self.settings {
            tracing::warn!(
                "configuration: changes of [pool], [nbd], [tenants], api, disks-dir and sandbox \
                 take effect only after a restart"
            );
        }
        self.stop_timeout = options.stop_timeout;
        self.host.set_stop_timeout(options.stop_timeout);
        self.take_definitions(&options.disks, found);
        tracing::info!("configuration: reloaded");
        self.events.tell(Happened::Reloaded);
    }

    fn take_definitions(&mut self, disks: &[DiskOptions], found: Found) {
        self.feed(Event::DefinitionsRead {
            declared: specs(disks).cloned().collect(),
            places: places(disks),
            found,
        });
    }
}

/// Leaves out the disks whose data a file in `disks_dir` defines differently.
pub fn one_definition_each(
    disks: &[DiskOptions],
    found: &Found,
    disks_dir: Option<&Path>,
) -> Vec<DiskOptions> {
    let known = without_conflicts(specs(disks), found, disks_dir);
    let is_known = |disk: &&DiskOptions| known.contains(&&*disk.spec);
    disks.iter().filter(is_known).cloned().collect()
}
