//! A server that goes on in another process.

use super::{Book, Origin};
use crate::answer::{Asker, Kind, Refusal};
use crate::error::Error;
use crate::files::KeptDisks;
use crate::handover::{Estate, Given};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// Another process is to go on.
pub struct Upgrade {
    /// None: the program that is now where this one came from.
    pub binary: Option<PathBuf>,
    pub asker: Asker,
}

impl Book {
    /// What cannot be handed over is refused before anything is waited for.
    pub(super) fn begin_upgrade(&mut self, upgrade: Upgrade) {
        let conflict = |text| Kind::Conflict.because(text);
        let refusal = match (&self.upgrade, self.host.estate()) {
            (Some(_), _) => Some(conflict("an upgrade is under way".to_owned())),
            (None, Ok(estate)) => estate.may_be_handed_over().map_err(conflict).err(),
            (None, Err(refusal)) => Some(refusal),
        };
        match refusal {
            Some(refusal) => (upgrade.asker)(Err(refusal)),
            None => self.upgrade = Some(upgrade),
        }
    }

    /// Somebody wants another process to go on, and nothing is half done any more.
    pub fn take_upgrade(&mut self) -> Option<Upgrade> {
        let is_settled = self.is_settled();
        self.upgrade.take_if(|_| is_settled)
    }

    /// The disks, for another process.
    pub fn estate(&mut self) -> Result<&mut dyn Estate, Refusal> {
        self.host.estate()
    }

    /// What a successor gets: the disks, from now on as they are, and why they are there.
    pub fn give(&mut self) -> Result<Given, String> {
        let estate = self.host.estate().map_err(|refusal| refusal.text)?;
        let mut given = estate.give()?;
        let mut add = |(path, dir): &(PathBuf, OwnedFd)| {
            let number = given.files.add(dir)?;
            Ok((path.clone(), number))
        };
        let kept = self.kept.as_ref().map(&mut add).transpose();
        let failed = |error: io::Error| format!("cannot duplicate a descriptor: {error}");
        given.state.kept = kept.map_err(failed)?;
        given.state.files = given.files.len();
        given.state.origins = self.origins.clone();
        Ok(given)
    }

    /// Go on from where a predecessor stops; its kept disks' directory comes with its lock.
    pub fn take(
        &mut self,
        origins: BTreeMap<String, Origin>,
        kept: Option<(PathBuf, OwnedFd)>,
    ) -> Result<(), Error> {
        self.origins = origins;
        match kept {
            Some((path, dir)) => self.start_keeper(KeptDisks::adopt(path, dir)),
            None => Ok(()),
        }
    }
}
