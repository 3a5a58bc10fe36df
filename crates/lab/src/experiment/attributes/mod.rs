//! The table of characteristics of a post that compares technologies (Brendan Gregg, "Virtualization
//! Performance: Zones, KVM, Xen"), each cell measured where it can be.

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
        "Of which there is a column each; those that run here, if not given",
        Kind::of::<Technology>(Technology::FORM),
        "",
    ),
    Parameter {
        default: "3s",
        about: "How long each load runs",
        ..shared::RUNTIME
    },
    Parameter::new(
        "place",
        "The storage that all have: where the disks' files are made",
        Kind::of::<Place>("DIRECTORY"),
        "/var/tmp",
    ),
    Parameter {
        about: "Size of the two files, that of the neighbour's disk among them",
        ..shared::image_size("256M")
    },
    Parameter::new(
        "memory",
        "Of a machine, or the container's limit",
        Kind::Size {
            least: 256 << 20,
            most: 1 << 40,
        },
        "1G",
    ),
    Parameter::new(
        "cap",
        "The limit of CPU time that is tried, and that the neighbour gets",
        Kind::of::<Cpus>(Cpus::FORM),
        "0.2",
    ),
    Parameter::new(
        "reads",
        "Reads a second that a neighbour on the same disk is limited to",
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
        "What is true of containers and virtual machines: a table, measured where it can be"
    }

    fn description(&self) -> &'static str {
        "The post's table of characteristics, with figures. Each technology, as in the experiment \
         `technologies`, has one CPU and --memory.\n\n`cpu`: sorting numbers in a cache. \
         `memory-access`: a read of 64 MiB whose place only the read before tells, which few caches \
         and few translations of addresses have. `memory`: what an idle one without fio takes, with its disk's \
         server, each page by the number of those who share it (PSS); `memory.kernel`: what its own \
         kernel keeps of what it was given. `start-up`: until its agent answers. `io.latency`: a read \
         of 4 KiB, one at a time; `io.throughput`: 128 KiB in order.\n\n`p99.*` is the 99th percentile \
         of such reads: alone, beside a second instance of the same technology that reads 64 KiB by \
         eight threads from the same storage, and beside one that is on the same CPU and does not \
         pause (`p99.pinned`: alone on that CPU). `*-limited`: that one is limited, to --reads a second by Fathom's filter `throttle` \
         where Fathom serves, else by its control group, and to --cap CPUs. `neighbour.*` are how many \
         times that of reads alone these are, on all CPUs or on the one.\n\n`cap.got`: percent of a \
         CPU that an instance takes which is to have --cap and wants all. `events.host`: events of the \
         host's kernel that tell of what happens in it: all of them where it is the same kernel, KVM's \
         of a guest, none where the host sees a process that emulates. `events.own`: those that it has \
         itself, in its tracefs. `processes.seen`: of its processes, those whose names the host \
         sees.\n\nThe suspected limiter is that of the reads of `io.latency`. What stands in quotes \
         was not measured by anybody."
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
        assert!(refused("memory", "268435457").contains("whole MiB"));
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
