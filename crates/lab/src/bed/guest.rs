//! A guest with one disk or one directory under test, and its server.

use std::fs;
use std::path::{Path, PathBuf};

use super::kvm_host::huge_pages;
use crate::environment;
use crate::error::{Context, Result};
use crate::evidence::{self, Watch, Watched};
use crate::guest::Guest;
use crate::host::Accelerator;
use crate::machine::Machine;
use crate::scratch::Scratch;
use crate::server::{Kind, Served, Server, Spec};

/// QEMU's id of the disk under test.
pub const DISK: &str = "disk";
/// File in a cell's folder with the server's final output, which for Fathom has the times by stage.
const SERVER_LOG: &str = "server.txt";

/// A booted guest, which is killed on drop.
#[derive(Debug)]
pub struct GuestBed {
    // Fields are dropped in order: QEMU must end before its server.
    pub guest: Guest,
    /// The disk's server; `None` if QEMU itself serves the disk.
    pub server: Option<Server>,
    /// The disk's device in the guest, such as /dev/vda; empty if the guest has a directory
    /// instead.
    pub device: String,
    /// The disk's image on the host, or the directory; empty if the server's image is not known.
    pub image: PathBuf,
    /// Whether the server's threads poll before they sleep.
    polls: bool,
    _dir: Option<Scratch>,
}

impl GuestBed {
    /// Starts the disk's server and boots the machine with the disk added to it.
    ///
    /// # Errors
    /// When a server or the guest does not start; the error has their last messages.
    pub fn boot(
        mut machine: Machine,
        kind: &Kind,
        spec: &Spec,
        progress: &mut dyn FnMut(&str),
    ) -> Result<GuestBed> {
        let Served { disk, server } = kind.serve(spec)?;
        machine.disks.push(disk);
        let with = format!("its disk served by {kind}");
        let mut bed = GuestBed::start(machine, server, &with, progress)?;
        bed.device = bed.guest.device(spec.name)?;
        bed.image = spec.image.to_owned();
        bed.polls = *kind == Kind::Fathom;
        Ok(bed)
    }

    /// Boots the machine, which already has the device that `server` serves.
    pub(super) fn start(
        mut machine: Machine,
        mut server: Option<Server>,
        with: &str,
        progress: &mut dyn FnMut(&str),
    ) -> Result<GuestBed> {
        if machine.huge_pages != Some(false)
            && environment::is_stretched()
            && machine.accelerator() == Accelerator::Kvm
        {
            let are_there = huge_pages::reserve(machine.memory_mib);
            machine.huge_pages.get_or_insert(are_there);
        }
        progress(&format!(
            "booting a guest ({}), {with}",
            machine.accelerator().name()
        ));
        // A server may listen and then find no image; its error then says more than QEMU's.
        let guest = Guest::boot(&machine).map_err(|error| {
            let ended = server
                .as_mut()
                .map(|server| server.process().expect_running());
            ended.and_then(Result::err).unwrap_or(error)
        })?;
        Ok(GuestBed {
            guest,
            server,
            device: String::new(),
            image: PathBuf::new(),
            polls: false,
            _dir: None,
        })
    }

    /// Adds the directory of the image and the sockets, which is removed after the guest and the
    /// server.
    #[must_use]
    pub fn with_dir(mut self, dir: Scratch) -> Self {
        self._dir = Some(dir);
        self
    }

    /// Returns what to watch from outside while the guest works: QEMU, the disk's server and the
    /// block device below its image.
    pub(super) fn watch(&mut self) -> Watch {
        let polls = self.polls;
        let mut processes = vec![Watched::new(self.guest.pid(), evidence::Kind::Qemu)];
        if let Some(server) = &mut self.server {
            processes.push(Watched {
                polls,
                ..Watched::new(server.process().pid(), evidence::Kind::Server)
            });
        }
        Watch {
            processes,
            // `None` if the device is unknown, for example for a file on a network file system.
            device: evidence::device_below(&self.image).unwrap_or_default(),
            ..Watch::default()
        }
    }

    /// Powers the guest off, stops the server, and returns the server's output.
    ///
    /// # Errors
    /// When one of them does not end, or fails.
    pub fn end(mut self) -> Result<String> {
        self.guest.power_off()?;
        match self.server.take() {
            Some(server) => server.stop(),
            None => Ok(String::new()),
        }
    }

    /// Like [`end`](Self::end), but writes the server's output into the cell's folder.
    ///
    /// # Errors
    /// Those of [`end`](Self::end), and when the output cannot be written.
    pub fn end_into(self, folder: &Path) -> Result<()> {
        let said = self.end()?;
        if said.trim().is_empty() {
            return Ok(());
        }
        let path = folder.join(SERVER_LOG);
        fs::write(&path, said).context(|| format!("cannot write {}", path.display()))
    }
}
