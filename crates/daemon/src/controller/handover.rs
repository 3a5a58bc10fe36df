//! Hands the server over to another process.

use super::{Controller, registry_settings};
use crate::files::KeptDisks;
use fathom_control::{Definition, Definitions, ErrorKind, Registry, RequestError};
use fathom_host::handover::{Given, HandoverHost};
use fathom_host::{Error, Host};
use fathom_requests::Responder;
use fathom_units::cause;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A request for an upgrade.
pub struct Upgrade {
    /// The new program. Without it, the file that now has the path of this program.
    pub binary: Option<PathBuf>,
    pub responder: Responder,
    /// Operations in progress must end by then.
    until: Instant,
}

/// Time in which operations in progress must end before an upgrade.
const SETTLE: Duration = Duration::from_secs(20);
/// Number of times that outstanding commands are given up after that: more than any operation has
/// commands.
const GIVEN_UP: usize = 16;

impl Controller {
    /// Checks first whether the disks can be handed over at all.
    pub(super) fn begin_upgrade(
        &mut self,
        binary: Option<PathBuf>,
        disconnect: bool,
        responder: Responder,
    ) {
        let conflict = |text| ErrorKind::Conflict.because(text);
        let error = match (&self.upgrade, self.host.handover_host()) {
            (Some(_), _) => Some(conflict(
                "another upgrade is in progress; retry when it has ended".to_owned(),
            )),
            (None, Ok(handover_host)) => {
                handover_host.let_encrypted_end(disconnect);
                handover_host.may_be_handed_over().map_err(conflict).err()
            }
            (None, Err(error)) => Some(error),
        };
        match error {
            Some(error) => responder(Err(error)),
            None => {
                self.upgrade = Some(Upgrade {
                    binary,
                    responder,
                    until: Instant::now() + SETTLE,
                });
            }
        }
    }

    /// Time for which an upgrade may still wait.
    pub(super) fn until_upgrade_is_late(&self) -> Option<Duration> {
        let until = self.upgrade.as_ref()?.until;
        Some(until.saturating_duration_since(Instant::now()))
    }

    /// Returns the requested upgrade when no operation is in progress any more. An upgrade that has
    /// waited for too long fails.
    pub fn take_upgrade(&mut self) -> Option<Upgrade> {
        if self.is_settled() && self.host.is_settled() {
            return self.upgrade.take();
        }
        let now = Instant::now();
        if self
            .upgrade
            .as_ref()
            .is_some_and(|upgrade| upgrade.until <= now)
        {
            // Processes that do not respond stay as they are. An operation of several commands then
            // sends its next command, which the next round gives up. Commands that arrive meanwhile
            // are given up, too.
            for _ in 0..GIVEN_UP {
                self.host.give_up_commands();
                self.take_steps();
                if self.is_settled() && self.host.is_settled() {
                    return self.upgrade.take();
                }
            }
        }
        if let Some(late) = self.upgrade.take_if(|upgrade| upgrade.until <= now) {
            let text = "an operation on a disk is still in progress, or a disk's process does not \
                 respond; retry the upgrade later";
            (late.responder)(Err(ErrorKind::Conflict.because(text)));
        }
        None
    }

    /// The host alone.
    pub fn into_host(self) -> Box<dyn Host> {
        self.host
    }

    /// Returns the host as a [`HandoverHost`], or an error if its disks cannot be handed over.
    pub fn handover_host(&mut self) -> Result<&mut dyn HandoverHost, RequestError> {
        self.host.handover_host()
    }

    /// Returns the state that a successor gets: the disks, which do not change from now on, and
    /// their definitions.
    pub fn give(&mut self) -> Result<Given, String> {
        let handover_host = self.host.handover_host().map_err(|error| error.text)?;
        let mut given = handover_host.give()?;
        let mut add = |(path, dir): &(PathBuf, OwnedFd)| {
            let number = given.files.add(dir)?;
            Ok((path.clone(), number))
        };
        let kept = self.kept.as_ref().map(&mut add).transpose();
        let failed =
            |error: io::Error| format!("cannot duplicate a file descriptor: {}", cause(error));
        given.state.kept = kept.map_err(failed)?;
        given.state.files = given.files.len();
        let (served, definitions) = self.registry.to_handover();
        given.state.origins = served;
        given.state.definitions = Some(definitions);
        Ok(given)
    }

    /// Continues where a predecessor stops. The directory of its persistent disks comes with its
    /// lock.
    pub fn take(
        &mut self,
        origins: BTreeMap<String, Definition>,
        definitions: Definitions,
        kept: Option<(PathBuf, OwnedFd)>,
    ) -> Result<(), Error> {
        if let Some((path, dir)) = kept {
            self.start_keeper(KeptDisks::adopt(path, dir))?;
        }
        let settings = registry_settings(&*self.host, self.settings.kept.clone());
        let places = self.registry.places().clone();
        let (registry, effects) = Registry::from_handover(settings, origins, definitions, places);
        self.registry = registry;
        self.start(effects);
        Ok(())
    }
}
