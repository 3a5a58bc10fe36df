//! The table of characteristics of a blog post that compares technologies (Brendan Gregg,
//! "Virtualization Performance: Zones, KVM, Xen"). The table's values are measured if possible.

mod cell;
mod look;
mod neighbour;
mod rows;

use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::Sheet;

use super::place::Place;
use super::shared::{self, Cpus};
use super::technologies::{Disk, Technology};
use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield};
use crate::bed::instance;
use crate::error::Result;
use cell::Cell;

pub struct Attributes;

const TECHNOLOGY: &str = "technology";

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        TECHNOLOGY,
        "Technologies, one column each [default: those that run here]",
        Kind::of::<Technology>(Technology::FORM),
        "",
    ),
    Parameter {
        default: "3s",
        about: "Time of each load",
        ..shared::RUNTIME
    },
    Parameter::new(
        "place",
        "Directory for the files of all disks",
        Kind::of::<Place>("DIRECTORY"),
        "/var/tmp",
    ),
    Parameter {
        about: "Size of the two disks, the instance's and the neighbour's",
        ..shared::image_size("256M")
    },
    Parameter::new(
        "memory",
        "Memory of a machine, or limit of a container",
        Kind::Size {
            least: 256 << 20,
            most: 1 << 40,
        },
        "1G",
    ),
    Parameter::new(
        "cap",
        "Limit of CPU time in CPUs, for the instance and for the neighbour",
        Kind::of::<Cpus>(Cpus::FORM),
        "0.2",
    ),
    Parameter::new(
        "reads",
        "Limit of a neighbour on the same disk, in reads per second",
        Kind::Count {
            least: 1,
            most: 1 << 32,
        },
        "200",
    ),
];

impl Experiment for Attributes {
    fn name(&self) -> &'static str {
        "attributes"
    }

    fn about(&self) -> &'static str {
        "Characteristics of containers and virtual machines: a table, measured if possible"
    }

    fn description(&self) -> &'static str {
        "A table of characteristics, with figures. Each technology, as in the experiment \
         `technologies`, has one CPU and --memory.\n\n\
         `cpu` is the time to sort numbers in a cache. `memory-access` is the time of a \
         read in 64 MiB whose place depends on the read before, so that few caches and \
         address translations help. `memory` is what an idle instance without fio takes, \
         with its disk's server (PSS). `memory.kernel` is the part of --memory that the \
         instance's own kernel keeps. `start-up` is the time until the agent answers. \
         `io.latency` is a read of 4 KiB, one at a time; `io.throughput` is reads of 128 \
         KiB in order.\n\n\
         `p99.alone` and `p99.pinned` are the 99th percentile of such 4 KiB reads without a \
         neighbour, on all CPUs and on one CPU. `neighbour.disk` is the ratio to \
         `p99.alone` while a second instance of the same technology reads 64 KiB by eight \
         threads from the same storage. `neighbour.cpu` is the ratio to `p99.pinned` while \
         a second instance is busy on the same CPU without a pause. In `*-limited` that \
         neighbour is limited: to --reads per second, by Fathom's filter `throttle` or else \
         by the neighbour's control group; or to --cap CPUs.\n\n\
         `cap.got` is the percentage of a CPU that a busy instance takes if its limit is \
         --cap. `events.host` is the number of tracing events of the host's kernel that \
         show the inside of the instance: all events if the instance runs on that kernel, \
         the events of KVM for a guest, and none for an emulated guest. `events.own` is the \
         number of events in the instance's own tracefs. `processes.seen` is the percentage \
         of the instance's processes whose names the host sees.\n\n\
         The suspected limiter is that of the reads of `io.latency`. Words in quotes are \
         known properties that were not measured."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn sheet(&self) -> Option<Sheet> {
        Some(Sheet {
            parameter: TECHNOLOGY.to_owned(),
            rows: rows::all(),
        })
    }

    fn defaults(&self, parameter: &Parameter) -> Vec<String> {
        match parameter.name {
            TECHNOLOGY => Technology::here(),
            _ => parameter.defaults(),
        }
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        Cell::new(settings)?.check()
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let mut needs = shared::instance_needs(Cell::new(settings)?.technology().kind());
        needs.extend([
            Need::Program("fio"),
            Need::FioEngine("libaio"),
            Need::Root("a control group"),
        ]);
        Ok(needs)
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const LOADS: u32 = 7;
        const MACHINE: Duration = Duration::from_secs(60);
        Cell::new(settings).map_or(MACHINE, |cell| {
            let around = match cell.technology().kind() {
                instance::Kind::Bare | instance::Kind::Container => MACHINE / 4,
                _ => MACHINE,
            };
            around + cell.runtime * LOADS
        })
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Measuring {
            fathom: context.fathom.clone(),
        })
    }
}

struct Measuring {
    fathom: PathBuf,
}

impl Session for Measuring {
    fn cell(
        &mut self,
        settings: &Settings,
        _folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let cell = Cell::new(settings)?;
        let disks = [
            Disk::make(cell.latency(), progress)?,
            Disk::make(cell.latency(), progress)?,
        ];
        cell.run(
            &self.fathom,
            disks.each_ref().map(|disk| &*disk.path),
            progress,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_go_together_is_said() {
        let settings = Settings::defaults(PARAMETERS).with("size", "1M");
        Attributes.check(&settings).unwrap();
        let refused = |name: &str, value: &str| {
            let settings = settings.clone().with(name, value);
            Attributes.check(&settings).unwrap_err().to_string()
        };
        assert!(refused("cap", "1.5").contains("less than one CPU"));
        assert!(refused("memory", "268435457").contains("whole number of MiB"));
        assert!(refused("place", "nbd://h").contains("a directory"));
    }

    #[test]
    fn every_technology_has_words_where_nothing_is_measured() {
        for row in rows::all() {
            let has_words = |one: &Technology| row.said.contains_key(one.name());
            let said = Technology::ALL.iter().filter(|one| has_words(one)).count();
            match row.measure {
                Some(_) => assert_eq!(said, 0, "{}", row.heading),
                None => assert_eq!(said, Technology::ALL.len(), "{}", row.heading),
            }
        }
    }
}
