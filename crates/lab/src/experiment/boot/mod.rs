//! Boot time of a machine, and the parts of which it consists.

mod launch;
mod trace;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::{Span, Timeline};

use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield, shared};
use crate::bed::{DISK, image};
use crate::environment;
use crate::error::{Error, Result};
use crate::host::Accelerator;
use crate::kernel::Kernel;
use crate::machine::{Board, Firmware, Machine};
use crate::scratch::Scratch;
use crate::server::{self, Served, Spec};
use crate::words::words;
use launch::Launch;

pub struct Booting;

/// Value of `disk` for a machine without a disk.
const NONE: &str = "none";
/// Size of the disk, in bytes. The guest does not read it.
const DISK_SIZE: u64 = 64 << 20;

words! {
    /// Form in which QEMU gets the kernel.
    pub enum Image {
        /// As installed: its first part decompresses the rest.
        Packed = "packed",
        /// As an ELF file, decompressed in advance.
        Elf = "elf",
    }
}

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        "machine",
        "Machine type of QEMU",
        Kind::of::<Board>(Board::FORM),
        "pc",
    ),
    Parameter::new(
        "firmware",
        "Firmware that starts the kernel [default: qboot on microvm, otherwise seabios]",
        Kind::of::<Firmware>(Firmware::FORM),
        "",
    ),
    Parameter::new(
        "image",
        "Image of the kernel: as installed (packed), or decompressed in advance (elf)",
        Kind::of::<Image>(Image::FORM),
        "packed",
    ),
    Parameter::new(
        "accelerator",
        "Accelerator of the guest [default: the fastest here]",
        Kind::of::<Accelerator>(Accelerator::FORM),
        "",
    ),
    Parameter::new(
        "disk",
        "Server of the machine's disk, or none",
        Kind::Word {
            form: "none, fathom, qemu, qemu-main, qemu-no-ioeventfd, qemu-mapped, qsd",
            check: |text| match text {
                NONE => Ok(()),
                _ => text.parse::<server::Kind>().map(drop),
            },
        },
        NONE,
    ),
    shared::SERVE,
    Parameter::new(
        "memory",
        "Memory of the machine",
        Kind::Size {
            least: 128 << 20,
            most: 1 << 40,
        },
        "512M",
    ),
    shared::vcpus("1"),
    Parameter::new(
        "kernel",
        "Kernel of the guest, such as /boot/vmlinuz-RELEASE [default: the lab's]",
        Kind::Text,
        "",
    ),
    Parameter::new(
        "append",
        "Further parameters of the kernel, such as --append=loglevel=7",
        Kind::List,
        "",
    ),
    Parameter::new(
        "warm-ups",
        "Number of launches of each point before the measured ones",
        Kind::Count {
            least: 0,
            most: 100,
        },
        "1",
    )
    .rarely(),
    Parameter::new(
        "time-line",
        "Whether to trace one more launch of each point for the time line",
        Kind::Switch,
        "on",
    ),
];

impl Experiment for Booting {
    fn name(&self) -> &'static str {
        "boot"
    }

    fn about(&self) -> &'static str {
        "Time to start a small guest and power it off, part by part"
    }

    fn description(&self) -> &'static str {
        "Each round starts a machine with a small guest (kernel, busybox, an agent) and \
         powers it off again. `boot` is the time from the start of the VMM until the agent \
         has answered. `shutdown` is the time from the order to power off until the VMM has \
         ended. `launch` is their sum.\n\n\
         The parts follow each other. `vmm` ends when QEMU's monitor answers. `firmware` \
         ends when the clock of the guest's kernel starts, after the kernel was loaded and \
         has decompressed itself. `kernel` ends at the first process, `user-space` when the \
         agent listens, and `agent` when the agent has answered. The guest's shutdown and \
         the end of the VMM follow.\n\n\
         A message of the agent relates the clock of the guest's kernel to the clock of \
         this machine. The message arrives on the console, which takes up to some \
         milliseconds on an emulated machine. The agent's part includes that time.\n\n\
         The time line shows one more launch, whose kernel traces its initcalls and \
         programs. The launch is not measured, because tracing takes time. `fathom report \
         A B` shows what has become faster or slower between two runs; \
         `--against RUN` prints the same at the end of a run.\n\n\
         --rounds is the number of launches. Percentiles need at least 30."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn rounds(&self) -> u32 {
        10
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let cell = Cell::new(settings)?;
        cell.check()
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let cell = Cell::new(settings)?;
        let unpacks = (cell.image == Image::Elf).then_some(Need::Program("lz4"));
        let kvm = (cell.accelerator == Some(Accelerator::Kvm)).then_some(Need::Kvm);
        Ok(Need::GUEST.into_iter().chain(unpacks).chain(kvm).collect())
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        let is_fast = Cell::new(settings).is_ok_and(|cell| cell.accelerator() == Accelerator::Kvm);
        Duration::from_secs(if is_fast { 2 } else { 6 })
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Launching {
            fathom: context.fathom.clone(),
            warm: BTreeSet::new(),
        })
    }
}

struct Cell {
    board: Board,
    firmware: Option<Firmware>,
    image: Image,
    accelerator: Option<Accelerator>,
    disk: Option<server::Kind>,
    options: Vec<String>,
    memory_mib: u32,
    cpus: u32,
    kernel: Option<PathBuf>,
    append: Vec<String>,
    warm_ups: u32,
    has_time_line: bool,
}

impl Cell {
    fn new(settings: &Settings) -> Result<Cell> {
        let memory = Settings::needed("memory", settings.size("memory")?)?;
        let kernel = Some(settings.text("kernel")).filter(|path| !path.is_empty());
        Ok(Cell {
            board: settings.word("machine")?,
            firmware: settings.chosen("firmware")?,
            image: settings.word("image")?,
            accelerator: settings.chosen("accelerator")?,
            disk: match settings.text("disk") {
                NONE => None,
                _ => settings.chosen("disk")?,
            },
            options: settings.list("serve"),
            memory_mib: u32::try_from(memory >> 20)
                .map_err(|_| Error::Protocol("--memory: too much".into()))?,
            cpus: Settings::needed("vcpus", settings.count("vcpus")?)?,
            kernel: kernel.map(PathBuf::from),
            append: settings.list("append"),
            warm_ups: Settings::needed("warm-ups", settings.count("warm-ups")?)?,
            has_time_line: settings.is_on("time-line"),
        })
    }

    fn accelerator(&self) -> Accelerator {
        self.accelerator.unwrap_or_else(Accelerator::detect)
    }

    fn firmware(&self) -> Firmware {
        self.firmware.unwrap_or(self.board.firmware())
    }

    fn check(&self) -> Result<()> {
        if let Some(reason) = self.contradiction() {
            return Err(Error::Protocol(reason));
        }
        if let Some(path) = &self.kernel {
            Kernel::named(path)?;
        }
        match &self.disk {
            Some(disk) => disk.check(&self.spec()),
            None if self.options.is_empty() => Ok(()),
            None => Err(Error::Protocol(
                "--serve: options of a server; name one with --disk fathom".into(),
            )),
        }
    }

    /// Returns why some values do not go together, or `None`.
    fn contradiction(&self) -> Option<String> {
        let (board, firmware, image) = (self.board, self.firmware(), self.image);
        match (board, firmware, image) {
            (Board::Microvm, Firmware::Ovmf, _) => {
                Some("--firmware ovmf: it finds nothing to start on --machine microvm".into())
            }
            (_, Firmware::Ovmf, Image::Elf) => Some(
                "--firmware ovmf starts a kernel that is a UEFI program: not --image elf".into(),
            ),
            (Board::Microvm, Firmware::SeaBios, Image::Elf) => Some(
                "--machine microvm starts an --image elf by --firmware qboot, not by seabios"
                    .into(),
            ),
            (Board::Microvm, ..) => self.of_its_disk(),
            _ => None,
        }
    }

    /// Returns why the disk does not work on microvm, which has no PCI, or `None`.
    fn of_its_disk(&self) -> Option<String> {
        let disk = self.disk.as_ref()?;
        match disk {
            server::Kind::QemuMapped => {
                Some("--disk qemu-mapped: not on --machine microvm".to_owned())
            }
            // On microvm, QEMU has ioeventfd only with KVM. Otherwise the server would get no
            // kicks.
            _ if !disk.is_in_qemu() && self.accelerator() != Accelerator::Kvm => Some(format!(
                "--disk {disk}: on --machine microvm only with KVM, which QEMU needs there to hand a \
                 guest's kicks on"
            )),
            _ => None,
        }
    }

    /// The disk, without its image.
    fn spec(&self) -> Spec<'static> {
        Spec {
            name: DISK,
            options: self.options.clone(),
            ..Spec::default()
        }
    }

    fn machine(&self) -> Machine {
        Machine {
            board: self.board,
            firmware: self.firmware,
            accelerator: self.accelerator,
            memory_mib: self.memory_mib,
            cpus: self.cpus,
            append: self.append.clone(),
            tools: false,
            ..Machine::default()
        }
    }
}

/// Launches machines. The first launches of each point are warm-ups, and are not measured.
struct Launching {
    fathom: PathBuf,
    warm: BTreeSet<Settings>,
}

impl Session for Launching {
    fn cell(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let cell = Cell::new(settings)?;
        let dir = Scratch::on_disk()?;
        let mut machine = cell.machine();
        let kernel = match &cell.kernel {
            Some(path) => Kernel::named(path)?,
            None => Kernel::find()?,
        };
        machine.kernel = Some(match cell.image {
            Image::Packed => kernel,
            Image::Elf => kernel.unpacked(&dir.path().join("vmlinux"))?,
        });
        // A single server for all launches of the cell, so that its start is not measured.
        let mut server = None;
        if let Some(kind) = &cell.disk {
            let path = dir.path().join("disk.img");
            image::fill(&path, DISK_SIZE)?;
            let served = kind.serve(&Spec {
                fathom: &self.fathom,
                dir: dir.path(),
                image: &path,
                ..cell.spec()
            })?;
            let Served { disk, server: own } = served;
            machine.disks.push(disk);
            server = own;
        }
        if !self.warm.contains(settings) {
            for _ in 0..cell.warm_ups {
                progress("launching to warm up");
                Launch::run(&machine, &mut |_| Ok(()))?;
            }
            if cell.has_time_line {
                progress("launching, traced");
                time_line(&machine)?.save(folder)?;
            }
            self.warm.insert(settings.clone());
        }
        progress("launching");
        let launch = Launch::run(&machine, &mut |guest| match guest
            .check("ls -d /sys/block/vd*", PATIENCE)
        {
            Err(error) if cell.disk.is_some() => Err(error),
            _ => Ok(()),
        })?;
        if let Some(server) = server {
            server.stop()?;
        }
        let mut environment = environment::with_guests();
        environment.accelerator = cell.accelerator().name().into();
        Ok(Yield {
            measures: launch.measures(),
            environment: Some(environment),
            ..Yield::default()
        })
    }
}

const PATIENCE: Duration = Duration::from_secs(60);

/// Launches a machine whose kernel traces its boot, and returns the time line.
fn time_line(machine: &Machine) -> Result<Timeline> {
    let mut machine = machine.clone();
    machine.append.extend(trace::words());
    let mut traced = Vec::new();
    let launch = Launch::run(&machine, &mut |guest| {
        traced = trace::read(guest)?;
        Ok(())
    })?;
    let mut spans = launch.spans();
    let (kernel, end) = (launch.since(launch.kernel), launch.since(launch.answered));
    let traced = traced.into_iter().map(|span| Span {
        begin: span.begin + kernel,
        ..span
    });
    // Later spans come from the programs that read the trace.
    spans.extend(traced.filter(|span| span.begin < end));
    Ok(Timeline { spans })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(settings: &[(&str, &str)]) -> Result<()> {
        let defaults = Settings::defaults(PARAMETERS);
        let all = settings.iter();
        Booting.check(&all.fold(defaults, |all, (name, value)| all.with(name, value)))
    }

    #[test]
    fn what_does_not_go_together_is_said_in_one_line() {
        for (settings, words) in [
            (
                &[("machine", "microvm"), ("firmware", "ovmf")][..],
                "microvm",
            ),
            (&[("image", "elf"), ("firmware", "ovmf")], "not --image elf"),
            (
                &[
                    ("machine", "microvm"),
                    ("image", "elf"),
                    ("firmware", "seabios"),
                ],
                "by --firmware qboot",
            ),
            (
                &[
                    ("machine", "microvm"),
                    ("disk", "fathom"),
                    ("accelerator", "tcg"),
                ],
                "only with KVM",
            ),
            (&[("serve", "--poll=off")], "with --disk fathom"),
            (&[("kernel", "/nowhere")], "/nowhere"),
            (&[("disk", "socket:/nowhere")], "no vhost-user socket"),
        ] {
            let error = check(settings).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains('\n'), "{error}");
        }
        check(&[]).unwrap();
        check(&[("machine", "microvm"), ("image", "elf")]).unwrap();
    }
}
