//! The lab's small user space (busybox and the agent) with one disk under test, in all its
//! environments. The environments are virtual machines, user-mode Linux, containers, this machine
//! itself, and libguestfs with its own user space. Each kind has one file.

pub mod bare;
pub mod container;
pub mod hosted;
mod libguestfs;
mod loop_device;
mod uml;
mod work;

use std::collections::HashSet;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::{DISK, GuestBed, image};
use crate::error::{Context, Result};
use crate::evidence::tasks;
use crate::host::{self, Accelerator};
use crate::machine::{Aio, Machine};
use crate::process_tree;
use crate::scratch::Scratch;
use crate::server;
use crate::words::words;
use bare::Bare;
use container::Container;
use libguestfs::Libguestfs;
use uml::Uml;

pub use libguestfs::PROGRAM as GUESTFISH;
pub use uml::{PROGRAM as UML, check_cpu};

words! {
    /// The environment of the user space.
    pub enum Kind {
        /// This machine itself.
        Bare = "bare",
        /// Namespaces of this machine's kernel.
        Container = "container",
        /// A virtual machine with hardware virtualisation.
        Kvm = "kvm",
        /// A virtual machine that QEMU emulates.
        Tcg = "tcg",
        /// User-mode Linux: a kernel that is a process.
        Uml = "uml",
        /// An appliance of libguestfs, with its own user space.
        Libguestfs = "libguestfs",
    }
}

words! {
    /// How writes to the image are cached.
    pub enum Cache {
        /// Writes stay in this machine's page cache until they are flushed.
        Writeback = "writeback",
        /// Writes bypass the page cache, or are written through it to the device.
        None = "none",
    }
}

/// Specification of an instance.
#[derive(Clone, Debug)]
pub struct Spec<'a> {
    /// A raw file, or a block device.
    pub image: &'a Path,
    /// Whether instances without their own kernel get the file itself instead of a loop device over
    /// it.
    pub as_file: bool,
    /// Cache mode of the image.
    pub cache: Cache,
    /// Bytes: a machine's memory, or a container's limit. If `None`, a machine has a default size,
    /// and a container has no limit.
    pub memory: Option<u64>,
    /// Limit of a container's CPU time, in CPUs.
    pub cpus: Option<f64>,
    /// Number of a virtual machine's vCPUs.
    pub vcpus: u32,
    /// Whether the instance has fio.
    pub tools: bool,
    /// A program of this machine that the instance gets, with its libraries.
    pub program: Option<&'a Path>,
    /// Server of a virtual machine's disk.
    pub server: server::Kind,
    /// I/O engine with which the server reads and writes the image.
    pub aio: Aio,
    /// Path of the `fathom` program, if it is the server.
    pub fathom: &'a Path,
    /// Additional options of `fathom serve`, if it is the server.
    pub options: Vec<String>,
}

/// How instances without their own kernel get the disk.
#[derive(Clone, Copy, Debug)]
pub enum Given<'a> {
    /// As a block device; a file gets a loop device.
    Device(&'a Path, Cache),
    /// As the file itself.
    File(&'a Path),
}

impl Spec<'_> {
    /// Returns a specification with the page cache and without limits. QEMU's main loop serves a
    /// virtual machine's disk.
    pub fn new(image: &Path) -> Spec<'_> {
        Spec {
            image,
            as_file: false,
            cache: Cache::Writeback,
            memory: None,
            cpus: None,
            vcpus: 1,
            tools: false,
            program: None,
            server: server::Kind::QemuMain,
            aio: Aio::Threads,
            fathom: Path::new(""),
            options: Vec::new(),
        }
    }

    fn given(&self) -> Given<'_> {
        match self.as_file && !is_device(self.image) {
            true => Given::File(self.image),
            false => Given::Device(self.image, self.cache),
        }
    }

    fn container<'a>(&'a self, programs: &'a [PathBuf]) -> container::Spec<'a> {
        container::Spec {
            disk: Some(self.given()),
            memory: self.memory,
            cpus: self.cpus,
            programs,
            shares_network: false,
        }
    }

    fn programs(&self) -> Result<Vec<PathBuf>> {
        let fio = self.tools.then(|| host::program("fio"));
        let fio = fio.transpose()?.into_iter();
        Ok(fio.chain(self.program.map(Path::to_owned)).collect())
    }

    /// Returns the specification of a virtual machine's disk server, without its folder.
    fn served(&self) -> server::Spec<'_> {
        server::Spec {
            fathom: self.fathom,
            name: DISK,
            image: self.image,
            aio: self.aio,
            cache: self.cache.name(),
            options: self.options.clone(),
            ..server::Spec::default()
        }
    }
}

fn is_device(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|meta| meta.file_type().is_block_device())
}

/// A running instance, which is killed on drop.
#[derive(Debug)]
pub struct Instance {
    body: Body,
    image: PathBuf,
    /// Name of the program that the instance was given; empty without one.
    program: String,
}

#[derive(Debug)]
enum Body {
    Bare(Bare),
    Guest(Box<GuestBed>),
    Uml(Uml),
    Container(Container),
    Libguestfs(Libguestfs),
}

impl Kind {
    /// Returns the kind of virtual machine that this machine runs best.
    pub fn machine() -> Kind {
        match Accelerator::detect() {
            Accelerator::Kvm => Kind::Kvm,
            Accelerator::Tcg => Kind::Tcg,
        }
    }

    /// Builds what all instances of this kind share.
    ///
    /// # Errors
    /// When the build fails.
    pub fn prepare(self) -> Result<()> {
        match self {
            Kind::Libguestfs => libguestfs::prepare(),
            Kind::Bare | Kind::Container | Kind::Kvm | Kind::Tcg | Kind::Uml => Ok(()),
        }
    }

    /// Checks the specification before anything is started.
    ///
    /// # Errors
    /// When a limit cannot be set for this kind or on this machine, or its server is not usable.
    pub fn check(self, spec: &Spec) -> Result<()> {
        match (self, spec.cpus) {
            (Kind::Container, _) => container::check(&spec.container(&[])),
            (Kind::Kvm | Kind::Tcg, None) => spec.server.check(&spec.served()),
            (Kind::Libguestfs, None) => libguestfs::check(spec.cache),
            (_, None) => Ok(()),
            (_, Some(_)) => Err(crate::Error::Protocol(format!(
                "a limit of CPU time is only for containers, not for {self}"
            ))),
        }
    }
}

impl Instance {
    /// Starts an instance and waits until its agent listens.
    ///
    /// # Errors
    /// When the instance does not start; the error has its last messages.
    pub fn start(kind: Kind, spec: &Spec) -> Result<Instance> {
        kind.check(spec)?;
        let body = match kind {
            Kind::Bare => Body::Bare(Bare::start(Some(spec.given()), spec.program)?),
            Kind::Container => {
                let programs = spec.programs()?;
                Body::Container(Container::start(&spec.container(&programs))?)
            }
            Kind::Uml => Body::Uml(Uml::start(spec)?),
            Kind::Libguestfs => Body::Libguestfs(Libguestfs::start(spec)?),
            Kind::Kvm => Body::Guest(Box::new(boot(Accelerator::Kvm, spec)?)),
            Kind::Tcg => Body::Guest(Box::new(boot(Accelerator::Tcg, spec)?)),
        };
        Ok(Instance {
            body,
            image: spec.image.to_owned(),
            program: { spec.program.and_then(Path::file_name) }
                .map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        })
    }

    /// Returns the path of the disk under test in the instance.
    pub fn disk(&self) -> &str {
        match &self.body {
            Body::Bare(bare) => &bare.disk,
            Body::Guest(bed) => &bed.device,
            Body::Uml(_) => uml::DISK,
            Body::Container(container) => container.disk,
            Body::Libguestfs(_) => libguestfs::DISK,
        }
    }

    /// Returns the command by which scripts call the program that the instance was given.
    pub fn program(&self) -> &str {
        match &self.body {
            Body::Bare(_) => bare::PROGRAM,
            _ => &self.program,
        }
    }

    /// Runs a shell script in which each command must succeed (`set -e`), and returns its output.
    ///
    /// # Errors
    /// When the agent does not respond, or the script fails or does not end in time.
    pub fn check(&mut self, script: &str, timeout: Duration) -> Result<String> {
        match &mut self.body {
            Body::Bare(bare) => bare.hosted.check(script, timeout),
            Body::Guest(bed) => bed.guest.check(script, timeout),
            Body::Uml(uml) => uml.check(script, timeout),
            Body::Container(container) => container.hosted.check(script, timeout),
            Body::Libguestfs(appliance) => appliance.hosted.check(script, timeout),
        }
    }

    /// Like [`check`](Self::check), for a script with long output.
    ///
    /// # Errors
    /// Those of [`check`](Self::check).
    pub fn printed(&mut self, script: &str, timeout: Duration) -> Result<String> {
        match &mut self.body {
            Body::Uml(uml) => uml.printed(script, timeout),
            _ => self.check(script, timeout),
        }
    }

    /// Like [`check`](Self::check), for a script that reads exactly `mib` MiB from its standard
    /// input. The data are sent while the script runs: by virtio-serial, a socket, or libguestfs's
    /// `upload`. User-mode Linux reads them from a file that is written before. After a failure, no
    /// more data can be sent.
    ///
    /// # Errors
    /// Those of [`check`](Self::check), and when the data cannot be sent.
    pub fn upload(&mut self, mib: u64, script: &str, timeout: Duration) -> Result<String> {
        let what = || "cannot send data".to_owned();
        let (stream, script) = match &mut self.body {
            Body::Uml(uml) => return uml.upload(mib, script, timeout),
            Body::Bare(bare) => bare.way_in(script)?,
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
            let _ = stream.shutdown(Shutdown::Both); // otherwise the sender would block forever
        }
        let sent = sending.join();
        let sent = sent.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let text = done?;
        sent.context(what)?;
        Ok(text)
    }

    /// Returns the id of the instance's process on this machine, the ancestor of its other
    /// processes.
    pub fn pid(&self) -> u32 {
        match &self.body {
            Body::Bare(bare) => bare.hosted.pid(),
            Body::Guest(bed) => bed.guest.pid(),
            Body::Uml(Uml { hosted, .. })
            | Body::Container(Container { hosted, .. })
            | Body::Libguestfs(Libguestfs { hosted, .. }) => hosted.pid(),
        }
    }

    /// Returns the ids of the processes that were started: the instance's and its disk server's.
    pub fn started(&mut self) -> Vec<u32> {
        let own = self.pid();
        let server = match &mut self.body {
            Body::Guest(bed) => bed.server.as_mut(),
            _ => None,
        };
        let server = server.map(|server| server.process().pid());
        std::iter::once(own).chain(server).collect()
    }

    /// Returns the ids of the started processes and all their descendants.
    pub fn processes(&mut self) -> HashSet<u32> {
        let started = self.started().into_iter();
        started.flat_map(process_tree::below).collect()
    }

    /// Returns the CPU seconds of the instance's processes and its disk server on this machine.
    pub fn cpu_seconds(&mut self) -> f64 {
        let started = self.started().into_iter();
        started.map(process_tree::cpu_seconds).sum()
    }

    /// Pins all threads of the instance to one CPU, and the threads that they start later.
    ///
    /// # Errors
    /// When the CPU does not exist.
    pub fn pin(&mut self, cpu: usize) -> Result<()> {
        let mut set = CpuSet::new();
        set.set(cpu);
        for tid in self.processes().into_iter().flat_map(tasks) {
            let pid = i32::try_from(tid).ok().and_then(Pid::from_raw);
            match sched_setaffinity(pid, &set) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => {
                    let what = || format!("cannot keep thread {tid} on CPU {cpu}");
                    return Err(std::io::Error::from(error)).context(what);
                }
            }
        }
        Ok(())
    }

    /// Powers the instance off and waits for its end.
    ///
    /// # Errors
    /// When the instance does not end, or fails.
    pub fn end(self) -> Result<()> {
        match self.body {
            Body::Bare(bare) => bare.hosted.end(),
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
        tools: spec.tools,
        programs: Vec::from_iter(spec.program.map(Path::to_owned)),
        cpus: spec.vcpus,
        accelerator: Some(accelerator),
        memory_mib: memory.unwrap_or(defaults.memory_mib),
        ..defaults
    };
    let dir = Scratch::small()?;
    let served = server::Spec {
        dir: dir.path(),
        ..spec.served()
    };
    let bed = GuestBed::boot(machine, &spec.server, &served, &mut |_| {})?;
    Ok(bed.with_dir(dir))
}
