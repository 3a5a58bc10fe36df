//! What a run needs around the guest: an image, a server, and the guest itself.

use std::path::Path;
use std::time::Duration;

use fathom_run::{Benchmark, Role};

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

/// A guest that is ready for rounds. It is killed on drop.
pub(super) struct Bed {
    pub vm: GuestBed,
    /// (major, minor)
    pub qemu_version: (u32, u32),
    /// QEMU, its threads and disks, as found from outside.
    pub attached: attach::Qemu,
}

impl Bed {
    /// Makes the image, starts the server, boots the guest.
    pub fn make(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Bed> {
        let dir = Scratch::on_disk()?;
        let path = dir.path().join("disk.img");
        let size = options.size();
        progress(&format!("writing an image of {} MiB", size >> 20));
        image::fill(&path, size)?;
        // QEMU's I/O threads need an ioeventfd; without, the main loop serves.
        let kind = match options.transport {
            Transport::NoIoeventfd => &Kind::QemuMain,
            _ => &options.server,
        };
        let machine = Machine {
            // The driver has no more queues than the guest has CPUs.
            cpus: options.queues.into(),
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
        let spec = spec(options, dir.path(), &path);
        let mut vm = GuestBed::boot(machine, kind, &spec, progress)?.with_dir(dir);
        let name = vm.device.trim_start_matches("/dev/");
        // mq-deadline, the default, hands requests to a kernel thread.
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
        let mut workload = options.workload(&self.vm.image);
        workload.positional = positional;
        workload
    }
}

/// The disk, and what is asked of its server.
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
