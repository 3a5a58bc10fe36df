//! The bed of a cell: an image, a server, and the guest.

use std::path::Path;
use std::time::Duration;

use fathom_run::Benchmark;

use super::options::{Options, Place, Transport};
use crate::attach;
use crate::bed::{DISK, GuestBed, image};
use crate::error::Result;
use crate::host;
use crate::machine::Machine;
use crate::scratch::Scratch;
use crate::server::{Kind, Spec};
use crate::workload;

const SETTLE: Duration = Duration::from_secs(120);

/// A guest that is ready for rounds. The guest is killed on drop.
pub(super) struct Bed {
    pub vm: GuestBed,
    /// QEMU's version: (major, minor).
    pub qemu_version: (u32, u32),
    /// QEMU, its threads and disks, as inspected from outside.
    pub attached: attach::Qemu,
}

impl Bed {
    /// Creates the image, starts the server, and boots the guest.
    pub fn make(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Bed> {
        let dir = Scratch::on_disk()?;
        let path = dir.path().join("disk.img");
        let size = options.size();
        progress(&format!("writing an image of {} MiB", size >> 20));
        image::fill(&path, size)?;
        // QEMU's I/O threads need an ioeventfd. Without one, the main loop serves the disk.
        let kind = match options.transport {
            Transport::NoIoeventfd => &Kind::QemuMain,
            _ => &options.server,
        };
        let machine = Machine {
            // The driver uses at most one queue per CPU of the guest.
            cpus: options.queues.into(),
            tools: false,
            programs: vec![options.fathom.clone()],
            // The TSC is the clock of the guest and of its trace, so that nothing has to be
            // converted.
            append: vec!["clocksource=tsc".into(), "tsc=reliable".into()],
            // If the guest panics, QEMU ends, and the console shows why. Time stamps in QEMU's log
            // tell which thread did what when.
            extra: ["-no-reboot", "-msg", "timestamp=on"]
                .map(str::to_owned)
                .into(),
            ..Machine::default()
        };
        let spec = spec(options, dir.path(), &path);
        let mut vm = GuestBed::boot(machine, kind, &spec, progress)?.with_dir(dir);
        let name = vm.device.trim_start_matches("/dev/");
        // The default, mq-deadline, passes requests to a kernel thread.
        let script = format!("echo none >/sys/block/{name}/queue/scheduler");
        vm.guest.check(&script, SETTLE)?;
        let guest = &vm.guest;
        let attached = attach::Qemu::inspect(guest.pid(), Some(guest.monitor()))?;
        Ok(Bed {
            vm,
            attached,
            qemu_version: host::qemu_version()?,
        })
    }

    /// Returns the disk under test.
    pub fn found(&mut self) -> Result<&mut attach::Found> {
        let index = self.attached.choose(Some(DISK))?;
        Ok(&mut self.attached.disks[index])
    }

    /// Returns the ID of the process that serves the disk; it may be QEMU itself.
    pub fn server_pid(&mut self) -> Result<u32> {
        let server = self.found()?.disk.server_pid;
        Ok(server.unwrap_or(self.attached.pid))
    }

    /// Returns the same benchmark for the image itself, without a guest.
    pub fn host_workload(&self, options: &Options, positional: bool) -> workload::Options {
        let mut workload = options.workload(&self.vm.image);
        workload.positional = positional;
        workload
    }
}

/// Returns the disk, and the options of its server.
fn spec<'a>(options: &'a Options, dir: &'a Path, image: &'a Path) -> Spec<'a> {
    let mut more = Vec::new();
    if options.server == Kind::Fathom {
        more.push("--json".to_owned());
    }
    if let Some(injection) = options.inject
        && injection.place != Place::Guest
    {
        more.push(format!("--inject={injection}"));
    }
    let filters = options.filters.iter();
    more.extend(filters.map(|filter| format!("--filter={filter}")));
    let properties = options.transport.properties().iter();
    Spec {
        fathom: &options.fathom,
        dir,
        name: DISK,
        image,
        aio: options.aio,
        cache: "none",
        queues: options.queues,
        poll: options.poll,
        options: more,
        properties: properties.map(|&one| one.to_owned()).collect(),
        ..Spec::default()
    }
}

/// Formats a round's results in one line.
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
