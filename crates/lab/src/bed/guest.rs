//! A guest with one disk or one directory under test, and its server.

use std::fs;
use std::path::{Path, PathBuf};

use super::kvm_host::huge_pages;
use crate::attach::{ServerOf, server_of};
use crate::environment;
use crate::error::{Context, Result};
use crate::evidence::{self, Watch, Watched};
use crate::guest::Guest;
use crate::host::Accelerator;
use crate::machine::Machine;
use crate::scratch::Scratch;
use crate::server::{Kind, Served, Server, Spec};
use crate::tracers::fathom::Api;

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
    /// The server of `--disk socket:PATH`, which the lab has not started.
    outside: Option<Outside>,
    /// Whether the server's threads poll before they sleep.
    polls: bool,
    _dir: Option<Scratch>,
}

/// A running server that serves the disk.
#[derive(Debug)]
struct Outside {
    pid: u32,
    socket: PathBuf,
    /// The API socket, if the server is Fathom and serves the disk there.
    api: Option<PathBuf>,
}

impl Outside {
    /// Finds the server that serves the disk with this socket to a running QEMU.
    fn find(qemu: u32, socket: &Path) -> Option<Outside> {
        let ServerOf { pid, api } = server_of(qemu, socket)?;
        Some(Outside {
            pid,
            socket: socket.to_owned(),
            api: api.filter(|api| Api::connect_to_disk(api, socket).is_ok()),
        })
    }

    /// Connects to the API of the disk, if the server is Fathom.
    fn connect(&self) -> Result<Option<Api>> {
        let api = self.api.as_ref();
        api.map(|api| Api::connect_to_disk(api, &self.socket))
            .transpose()
    }

    /// Returns the path of the image, if it is known.
    fn image(&self) -> Option<PathBuf> {
        let info = self.connect().ok()??.info().ok()?;
        Some(PathBuf::from(info.disk)).filter(|path| path.is_absolute())
    }
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
        if let Kind::Socket(path) = kind {
            bed.outside = Outside::find(bed.guest.pid(), path);
            let outside = bed.outside.as_ref();
            bed.polls = outside.is_some_and(|outside| outside.api.is_some());
            bed.image = outside.and_then(Outside::image).unwrap_or_default();
        }
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
            outside: None,
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
        let own = self.server.as_mut().map(|server| server.process().pid());
        let server = own.or(self.outside.as_ref().map(|outside| outside.pid));
        processes.extend(server.map(|pid| Watched {
            polls,
            ..Watched::new(pid, evidence::Kind::Server)
        }));
        Watch {
            processes,
            // `None` if the device is unknown, for example for a file on a network file system.
            device: evidence::device_below(&self.image).unwrap_or_default(),
            ..Watch::default()
        }
    }

    /// Returns the API of the disk's server, if that is Fathom.
    ///
    /// # Errors
    /// When the server does not respond.
    pub(super) fn api(&self) -> Result<Option<Api>> {
        let own = self.server.as_ref().and_then(|server| server.api());
        match (own, &self.outside) {
            (Some(path), _) => Api::connect(path).map(Some),
            (None, Some(outside)) => outside.connect(),
            (None, None) => Ok(None),
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
