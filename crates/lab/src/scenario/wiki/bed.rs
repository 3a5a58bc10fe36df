//! What a run needs around the guest: an image, a server, and the guest itself.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::{Benchmark, Role};

use super::options::{Options, Place, Server as Kind, Transport};
use crate::attach;
use crate::error::Result;
use crate::guest::Guest;
use crate::host;
use crate::kvm_host::huge_pages;
use crate::machine::{Disk, Machine, QemuDisk};
use crate::scenario::image;
use crate::scratch::Scratch;
use crate::server::{Server, StorageDaemon};
use crate::workload;

/// QEMU's id for the disk, and Fathom's name for it.
pub(super) const DISK: &str = "disk";
const SETTLE: Duration = Duration::from_secs(120);

/// A guest that is ready for rounds. It is killed on drop.
pub(super) struct Bed {
    // Fields are dropped in order: QEMU goes before its server, and that before its image.
    pub guest: Guest,
    pub server: Option<Server>,
    /// (major, minor)
    pub qemu_version: (u32, u32),
    /// QEMU, its threads and disks, as found from outside.
    pub attached: attach::Qemu,
    /// The device in the guest, such as /dev/vda.
    pub device: String,
    pub image: PathBuf,
    _dir: Scratch,
}

impl Bed {
    /// Makes the image, starts the server, boots the guest.
    pub fn make(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Bed> {
        let dir = Scratch::on_disk()?;
        let path = dir.path().join("disk.img");
        let size = options.size();
        progress(&format!("writing an image of {} MiB", size >> 20));
        image::fill(&path, size)?;
        let server = start_server(options, dir.path(), &path)?;
        let mut machine = Machine {
            // The driver has no more queues than the guest has CPUs.
            cpus: options.queues.into(),
            disks: vec![disk(options, &path, server.as_ref())],
            tools: false,
            programs: vec![options.fathom.clone()],
            // One vCPU's TSC is its clock and that of its trace: nothing has to be converted.
            append: vec!["clocksource=tsc".into(), "tsc=reliable".into()],
            // A guest that panics ends QEMU, and its console tells why.
            // Times in its log tell which thread did what when.
            extra: ["-no-reboot", "-msg", "timestamp=on"]
                .map(str::to_owned)
                .into(),
            ..Machine::default()
        };
        machine.huge_pages = options.is_nested && huge_pages::reserve(machine.memory_mib);
        progress(&format!(
            "booting a guest ({}), its disk served by {}",
            machine.accelerator().name(),
            options.server
        ));
        let mut guest = Guest::boot(&machine)?;
        let device = guest.device(DISK)?;
        let name = device.trim_start_matches("/dev/");
        // mq-deadline, the default, hands requests to a kernel thread.
        guest.check(
            &format!("echo none >/sys/block/{name}/queue/scheduler"),
            SETTLE,
        )?;
        let attached = attach::Qemu::inspect(guest.pid(), Some(guest.monitor()))?;
        Ok(Bed {
            guest,
            attached,
            server,
            qemu_version: host::qemu_version()?,
            device,
            image: path,
            _dir: dir,
        })
    }

    /// The disk under test.
    pub fn found(&mut self) -> Result<&mut attach::Found> {
        let index = self.attached.choose(Some(DISK))?;
        Ok(&mut self.attached.disks[index])
    }

    /// The process that serves the disk: QEMU itself where nobody else does.
    pub fn server_pid(&mut self) -> Result<u32> {
        let server = self.found()?.disk.server_pid;
        Ok(server.unwrap_or(self.attached.pid))
    }

    /// The threads of QEMU and of the disk's server, as they are now; those that have ended since
    /// an earlier look are kept, and so is what was learnt of the others.
    pub fn look_at_threads(&mut self) {
        let mut now = attach::threads_of(self.attached.pid);
        for server in self.attached.servers() {
            now.extend(attach::server_threads(server));
        }
        let known = &mut self.attached.threads;
        for new in now.iter_mut().filter(|new| new.role == Role::Other) {
            if let Some(old) = known.iter().find(|old| old.tid == new.tid) {
                new.role = old.role;
            }
        }
        known.retain(|old| now.iter().all(|new| new.tid != old.tid));
        known.append(&mut now);
    }

    /// The same benchmark on the image itself, without a guest.
    pub fn host_workload(&self, options: &Options, positional: bool) -> workload::Options {
        let mut workload = options.workload(&self.image);
        workload.positional = positional;
        workload
    }

    /// Powers the guest off, ends the server, and returns what it printed.
    pub fn end(mut self) -> Result<String> {
        self.guest.power_off()?;
        match self.server.take() {
            Some(server) => server.stop(),
            None => Ok(String::new()),
        }
    }
}

fn start_server(options: &Options, dir: &Path, image: &Path) -> Result<Option<Server>> {
    let polling = (!options.poll).then_some(0);
    match options.server {
        Kind::Qemu => Ok(None),
        Kind::Qsd => {
            let export = StorageDaemon {
                image,
                aio: options.aio,
                direct: true,
                queues: options.queues,
                // In an I/O thread in both cases: this is QEMU's own default.
                poll_max_ns: polling.or(Some(32_768)),
            };
            Server::storage_daemon(dir, DISK, &export).map(Some)
        }
        Kind::Fathom => {
            let mut args = vec![
                format!("--aio={}", options.aio.name()),
                format!("--poll={}", if options.poll { "auto" } else { "off" }),
                format!("--queues={}", options.queues),
                "--json".to_owned(),
            ];
            if let Some(injection) = options.inject
                && injection.place != Place::Guest
            {
                let micros = injection.delay.as_micros();
                args.push(format!("--inject={}={micros}us", injection.place));
            }
            let filters = options.filters.iter();
            args.extend(filters.map(|filter| format!("--filter={filter}")));
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let disk = image.to_string_lossy();
            Server::fathom(&options.fathom, dir, DISK, &disk, &args).map(Some)
        }
    }
}

fn disk(options: &Options, image: &Path, server: Option<&Server>) -> Disk {
    let mut disk = match server {
        Some(server) => Disk::vhost_user(DISK, server.socket()).with_queues(options.queues),
        None => Disk::qemu(
            DISK,
            QemuDisk {
                image: image.to_owned(),
                aio: options.aio,
                cache: "none".into(),
                read_only: false,
                // QEMU's I/O threads need an ioeventfd; without, the main loop serves.
                iothread: (options.transport != Transport::NoIoeventfd)
                    .then_some((!options.poll).then_some(0)),
                queues: Some(options.queues),
            },
        ),
    };
    for property in options.transport.properties() {
        disk = disk.with_property(property);
    }
    disk
}

/// One line of a round's figures.
pub(super) fn figures(benchmark: &Benchmark) -> String {
    let errors = match benchmark.errors {
        0 => String::new(),
        count => format!(", {count} FAILED"),
    };
    format!(
        "{} x {}: {:.1} us each{errors}",
        benchmark.operations,
        benchmark.call,
        benchmark.mean_ns / 1000.0
    )
}
