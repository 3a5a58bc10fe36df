//! The tables of a KVM storage talk at the Linux Plumbers Conference of 2010: FFSB's scenarios on a
//! file system in a guest, with several servers of its disk, and on the host itself.

mod cell;
mod load;
mod session;

use std::time::Duration;

use fathom_run::Beside;

use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, shared};
use crate::error::Result;
use cell::{Cell, Side};
use load::{Scale, Scenario};
use session::Running;

pub struct Ffsb;

const DISK: &str = "disk";

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        DISK,
        "Servers of the guest's disk; bare: a directory of this machine, without a guest",
        Kind::of::<Side>(Side::FORM),
        "qemu-no-ioeventfd,qemu,fathom,bare",
    ),
    Parameter::new(
        "scenario",
        "Work on the files",
        Kind::of::<Scenario>(Scenario::FORM),
        "large-file-creates-256k,sequential-reads-256k,large-file-creates-8k,\
         sequential-reads-8k,random-reads,random-writes,mixed,mail-server",
    ),
    Parameter::new(
        "threads",
        "Number of threads, each with one request in flight",
        Kind::Count {
            least: 1,
            most: 256,
        },
        "1,8,16",
    ),
    Parameter::new(
        "scale",
        "Factor for the talk's number of files, their sizes, and 300 s for each load",
        Kind::of::<Scale>("a number above 0, and at most 1"),
        "0.1",
    ),
    Parameter::new(
        "runtime",
        "Time of each load, instead of the one by --scale",
        Kind::Time {
            least: Duration::from_millis(100),
            most: Duration::from_secs(24 * 3600),
        },
        "",
    ),
    shared::FILE_SYSTEM,
    shared::vcpus("2"),
    Parameter::new(
        "size",
        "Size of the sparse image, which takes only the space of the files",
        Kind::Size {
            least: 256 << 20,
            most: 1 << 44,
        },
        "8G",
    ),
    shared::aio("native"),
    Parameter::new(
        "randseed",
        "Seed for the choice of files and blocks",
        Kind::Count {
            least: 1,
            most: 1 << 32,
        },
        "1",
    )
    .rarely(),
];

/// Columns of the talk's tables.
const SHOWN: &[(&str, &str)] = &[
    ("iops", "IOPS"),
    ("throughput", "MB/s"),
    ("guest.vcpu*", "vCPU %"),
    ("guest.busy", "total %"),
    ("guest.busy-per-mb", "% per MB/s"),
    ("host.busy", "host %"),
];

impl Experiment for Ffsb {
    fn name(&self) -> &'static str {
        "ffsb"
    }

    fn about(&self) -> &'static str {
        "The six scenarios of a KVM storage talk of 2010, in a guest and on the host"
    }

    fn description(&self) -> &'static str {
        "Threads work on the files of a file system in a guest with O_DIRECT, each with one \
         request in flight. The threads create large files, read files from start to end, read and \
         write random blocks, or run a mail server. FFSB ran these scenarios for a talk at \
         the Linux Plumbers Conference of 2010. The profiles of the talk are not public, so the \
         scenarios are reconstructions. `fathom bench` runs the mail server, and fio runs \
         all others.\n\n\
         The report compares each server of the guest's disk with the first: QEMU without \
         ioeventfd and I/O thread, as in 2010; QEMU with both, as the talk proposed; \
         Fathom; and `bare`, the same work in a directory of the host. In the row of `bare`, \
         vCPUs are the CPUs of the host. The disk has one queue, as in 2010.\n\n\
         `vCPU %` is the guest's own figure, `total %` the sum of all vCPUs, and `% per \
         MB/s` the cost of throughput for the guest. `host %` is the mean of all CPUs of \
         the host. Every cell begins with a trimmed disk, a new file system and new files, \
         none of which are in memory.\n\n\
         At --scale 1 there are 1,024 files of 100 MiB, 1 GiB for each large file, and \
         100,000 mails: use --size 130G.\n\n\
         Without hardware virtualisation the guest is emulated: its figures compare only \
         with those of other emulated guests."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn beside(&self) -> Option<Beside> {
        Some(Beside::of(DISK, SHOWN))
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        Cell::new(settings)?.check()
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let cell = Cell::new(settings)?;
        // The host runs the same scripts with the same shell.
        let mut needs = vec![Need::Program("busybox"), Need::Program("fio")];
        if let Side::Guest(_) = cell.side {
            needs.extend(Need::GUEST);
            needs.push(Need::Program(cell.bench.fs.maker()));
        }
        Ok(needs)
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        /// Speed of the host's disk, in bytes per second.
        const SPEED: u64 = 200 << 20;
        const AROUND: Duration = Duration::from_secs(5);
        let cell = Cell::new(settings);
        let time = cell.and_then(|cell| {
            let making = Duration::from_secs(cell.load.bytes()? / SPEED);
            Ok(cell.load.runtime + making)
        });
        AROUND + time.unwrap_or_default()
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Running::new(context.fathom.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Order;
    use super::*;

    #[test]
    fn the_plan_is_the_talks_tables() {
        let plan = Order::new(&Ffsb).plan().unwrap();
        // Eight scenarios with three numbers of threads, for four servers.
        assert_eq!(plan.cells.len(), 8 * 3 * 4);
        assert_eq!(plan.parameters["threads"], ["1", "8", "16"]);
        let beside = plan.beside.unwrap();
        assert_eq!(plan.parameters[&beside.parameter][0], "qemu-no-ioeventfd");
    }

    fn refused(changes: &[(&str, &str)]) -> String {
        let settings = Settings::defaults(PARAMETERS);
        Ffsb.check(&settings).unwrap();
        let set = |settings: Settings, (name, value): &(&str, &str)| settings.with(name, value);
        let settings = changes.iter().fold(settings, set);
        Ffsb.check(&settings).unwrap_err().to_string()
    }

    #[test]
    fn what_does_not_go_together_is_said() {
        let small = refused(&[("size", "512M"), ("scenario", "random-reads")]);
        assert!(small.contains("random-reads need"), "{small}");
        assert!(small.contains("--size more than 512M"), "{small}");
        let talk = refused(&[("scale", "1"), ("scenario", "mixed")]);
        assert!(talk.contains("give --size"), "{talk}");
        let many = refused(&[
            ("scenario", "mail-server"),
            ("threads", "200"),
            ("scale", "0.0001"),
        ]);
        assert!(many.contains("a file each"), "{many}");
        let text = "socket:/s".parse::<Side>().unwrap_err();
        assert!(text.contains("trims and formats"), "{text}");
        let text = "cloud".parse::<Side>().unwrap_err();
        assert_eq!(
            text,
            format!("unknown value 'cloud'; values are {}", Side::FORM)
        );
        for word in Side::FORM.split(", ") {
            word.parse::<Side>().unwrap();
        }
    }

    #[test]
    fn the_talks_own_sizes_fit_where_the_description_says() {
        let settings = Settings::defaults(PARAMETERS);
        let settings = settings.with("scale", 1).with("size", "130G");
        for scenario in Scenario::ALL {
            let settings = settings.clone().with("scenario", scenario);
            Ffsb.check(&settings.with("threads", 16)).unwrap();
        }
    }

    #[test]
    fn a_scale_shrinks_times_unless_one_is_given() {
        let settings = Settings::defaults(PARAMETERS);
        let time = |settings: &Settings| Cell::new(settings).unwrap().load.runtime.as_millis();
        assert_eq!(time(&settings), 30_000);
        let small = settings.with("scale", "0.001");
        assert_eq!(time(&small), 2_000);
        assert_eq!(time(&small.with("runtime", "500ms")), 500);
    }
}
