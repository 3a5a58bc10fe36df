//! Our small user space (busybox and the agent) with one disk under test, wherever it runs: in a
//! virtual machine, in user-mode Linux, in a container; and libguestfs's own. One file a kind.

pub mod container;
pub mod hosted;
mod libguestfs;
mod loop_device;
mod uml;

use std::io::Write;
use std::net::Shutdown;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{DISK, GuestBed, image};
use crate::error::{Context, Result};
use crate::evidence::{self, Watch, Watched};
use crate::host::Accelerator;
use crate::machine::{Aio, Machine};
use crate::process_tree;
use crate::scratch::Scratch;
use crate::server;
use crate::words::words;
use container::Container;
use libguestfs::Libguestfs;
use uml::Uml;

pub use libguestfs::PROGRAM as GUESTFISH;
pub use uml::{PROGRAM as UML, check_cpu};

/// A QEMU that is not ours, as the kernel calls it: 15 bytes.
const QEMU: &str = "qemu-system-x86";

words! {
    /// What the user space runs in.
    pub enum Kind {
        /// Namespaces of this machine's kernel.
        Container = "container",
        /// A virtual machine, by hardware.
        Kvm = "kvm",
        /// A virtual machine that QEMU emulates.
        Tcg = "tcg",
        /// A kernel that is a process.
        Uml = "uml",
        /// An appliance of libguestfs, with a user space of its own.
        Libguestfs = "libguestfs",
    }
}

words! {
    /// What becomes of writes to the image.
    pub enum Cache {
        /// They are in this machine's page cache until they are flushed.
        Writeback = "writeback",
        /// They go past it, or through it to the device at once.
        None = "none",
    }
}

/// What is to be started.
#[derive(Clone, Debug)]
pub struct Spec<'a> {
    /// A raw file, or a block device.
    pub image: &'a Path,
    pub cache: Cache,
    /// Bytes: of a machine, or a container's limit. A machine has some by itself, a container has no
    /// limit.
    pub memory: Option<u64>,
    /// A container's limit of CPU time, in CPUs.
    pub cpus: Option<f64>,
}

impl Spec<'_> {
    /// Through the page cache, without limits.
    pub fn new(image: &Path) -> Spec<'_> {
        Spec {
            image,
            cache: Cache::Writeback,
            memory: None,
            cpus: None,
        }
    }

    fn container(&self) -> container::Spec<'_> {
        container::Spec {
            disk: Some((self.image, self.cache)),
            memory: self.memory,
            cpus: self.cpus,
            programs: &[],
            shares_network: false,
        }
    }
}

/// A running one. It is killed on drop.
#[derive(Debug)]
pub struct Instance {
    body: Body,
    image: PathBuf,
}

#[derive(Debug)]
enum Body {
    Guest(Box<GuestBed>),
    Uml(Uml),
    Container(Container),
    Libguestfs(Libguestfs),
}

impl Kind {
    /// The virtual machine that this machine can run best.
    pub fn machine() -> Kind {
        match Accelerator::detect() {
            Accelerator::Kvm => Kind::Kvm,
            Accelerator::Tcg => Kind::Tcg,
        }
    }

    /// Makes what is made once for all that will be started.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn prepare(self) -> Result<()> {
        match self {
            Kind::Libguestfs => libguestfs::prepare(),
            Kind::Container | Kind::Kvm | Kind::Tcg | Kind::Uml => Ok(()),
        }
    }

    /// What can be said before anything is started.
    ///
    /// # Errors
    /// When a limit cannot be set, for this kind or on this machine.
    pub fn check(self, spec: &Spec) -> Result<()> {
        match (self, spec.cpus) {
            (Kind::Container, _) => container::check(&spec.container()),
            (Kind::Libguestfs, None) => libguestfs::check(spec.cache),
            (_, None) => Ok(()),
            (_, Some(_)) => Err(crate::Error::Protocol(format!(
                "a limit of CPU time is only for containers, not for {self}"
            ))),
        }
    }
}

impl Instance {
    /// Starts one and waits until its agent listens.
    ///
    /// # Errors
    /// When it does not come up, with its last words.
    pub fn start(kind: Kind, spec: &Spec) -> Result<Instance> {
        kind.check(spec)?;
        let body = match kind {
            Kind::Container => Body::Container(Container::start(&spec.container())?),
            Kind::Uml => Body::Uml(Uml::start(spec)?),
            Kind::Libguestfs => Body::Libguestfs(Libguestfs::start(spec)?),
            Kind::Kvm => Body::Guest(Box::new(boot(Accelerator::Kvm, spec)?)),
            Kind::Tcg => Body::Guest(Box::new(boot(Accelerator::Tcg, spec)?)),
        };
        Ok(Instance {
            body,
            image: spec.image.to_owned(),
        })
    }

    /// The disk under test inside.
    pub fn disk(&self) -> &str {
        match &self.body {
            Body::Guest(bed) => &bed.device,
            Body::Uml(_) => uml::DISK,
            Body::Container(_) => container::DISK,
            Body::Libguestfs(_) => libguestfs::DISK,
        }
    }

    /// Runs a shell script that must succeed (each of its commands: `set -e`) and returns what it
    /// printed.
    ///
    /// # Errors
    /// When the agent does not answer, or the script fails or does not end in time.
    pub fn check(&mut self, script: &str, timeout: Duration) -> Result<String> {
        match &mut self.body {
            Body::Guest(bed) => bed.guest.check(script, timeout),
            Body::Uml(uml) => uml.check(script, timeout),
            Body::Container(container) => container.hosted.check(script, timeout),
            Body::Libguestfs(appliance) => appliance.hosted.check(script, timeout),
        }
    }

    /// The same for a script that reads exactly so many MiB from its standard input, which are sent
    /// to it meanwhile: by virtio-serial or a socket; by libguestfs's `upload`; to user-mode Linux by a file
    /// that is written before. If that fails, no more can be sent.
    ///
    /// # Errors
    /// Likewise.
    pub fn upload(&mut self, mib: u64, script: &str, timeout: Duration) -> Result<String> {
        let what = || "cannot send data".to_owned();
        let (stream, script) = match &mut self.body {
            Body::Uml(uml) => return uml.upload(mib, script, timeout),
            Body::Container(container) => container.way_in(script)?,
            Body::Libguestfs(appliance) => appliance.way_in(mib, script)?,
            Body::Guest(bed) => {
                let script = format!("exec </tmp/.ports/fathom.signal\n{script}");
                (bed.guest.data().signal()?, script)
            }
        };
        let mut sender = stream.try_clone().context(what)?;
        let sending = std::thread::spawn(move || {
            let noise = image::noise();
            (0..mib).try_for_each(|_| sender.write_all(&noise))
        });
        let done = self.check(&script, timeout);
        if done.is_err() {
            let _ = stream.shutdown(Shutdown::Both); // or it would be written to for good
        }
        let sent = sending.join();
        let sent = sent.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let text = done?;
        sent.context(what)?;
        Ok(text)
    }

    /// What to look at from outside while it works. Of a container it is what was started first: each
    /// script has processes of its own.
    pub fn watch(&mut self) -> Watch {
        let device = evidence::device_below(&self.image).unwrap_or_default();
        let processes = match &mut self.body {
            Body::Guest(bed) => bed.watch().processes,
            Body::Uml(_) | Body::Container(_) => { process_tree::below(self.pid()).into_iter() }
                .map(|pid| Watched::new(pid, evidence::Kind::Load))
                .collect(),
            Body::Libguestfs(_) => { process_tree::named(self.pid(), QEMU).into_iter() }
                .map(|pid| Watched::new(pid, evidence::Kind::Qemu))
                .collect(),
        };
        Watch {
            processes,
            device,
            ..Watch::default()
        }
    }

    /// The process on this machine that it is, with all below it.
    pub fn pid(&self) -> u32 {
        match &self.body {
            Body::Guest(bed) => bed.guest.pid(),
            Body::Uml(Uml { hosted, .. })
            | Body::Container(Container { hosted, .. })
            | Body::Libguestfs(Libguestfs { hosted, .. }) => hosted.pid(),
        }
    }

    /// Powers it off, and waits for its end.
    ///
    /// # Errors
    /// When it does not end, or ends with a failure.
    pub fn end(self) -> Result<()> {
        match self.body {
            Body::Guest(bed) => bed.end().map(drop),
            Body::Uml(uml) => uml.end(),
            Body::Container(container) => container.end(),
            Body::Libguestfs(appliance) => appliance.hosted.end(),
        }
    }
}

fn boot(accelerator: Accelerator, spec: &Spec) -> Result<GuestBed> {
    let defaults = Machine::default();
    let memory = spec.memory.map(|bytes| (bytes >> 20) as u32);
    let machine = Machine {
        tools: false,
        accelerator: Some(accelerator),
        memory_mib: memory.unwrap_or(defaults.memory_mib),
        ..defaults
    };
    let dir = Scratch::small()?;
    let spec = server::Spec {
        name: DISK,
        dir: dir.path(),
        image: spec.image,
        aio: Aio::Threads,
        cache: spec.cache.name(),
        ..server::Spec::default()
    };
    let bed = GuestBed::boot(machine, &server::Kind::QemuMain, &spec, &mut |_| {})?;
    Ok(bed.with_dir(dir))
}
