//! Nesting depth of machines: each level boots the next one from its own disks.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fathom_run::{Better, Measure, Unit};

use super::nested::run_within;
use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield, probe};
use crate::bed::KvmHost;
use crate::error::{Error, Result};
use crate::evidence::exits;
use crate::host::{self, Accelerator};

pub struct Levels;

/// Memory that a level keeps when it passes the rest to the next level.
const KEPT_MIB: u64 = 384;
/// Minimum memory with which a machine boots.
const LEAST_MIB: u64 = 384;
/// Lines of an error that a cell keeps: the first, and the end of the console.
const SHOWN: usize = 8;
/// Pause before and after the reads, so that the level below can count the VM exits between them.
const PAUSE: Duration = Duration::from_millis(500);
/// Maximum time of a level's work except booting the next one.
const AROUND: Duration = Duration::from_secs(600);
/// Progress messages that a level sends to the level below.
const READS: &str = "reads of level ";
const READ: &str = "end of the reads of level ";
/// Name of a measure of each level.
const SORT: &str = "sort";

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        "levels",
        "Maximum number of levels",
        Kind::Count { least: 1, most: 16 },
        "3",
    ),
    Parameter::new(
        "memory",
        "Memory of level 1; each level passes all of its memory but 384 MiB to the next",
        Kind::Size {
            least: 1 << 30,
            most: 1 << 40,
        },
        "2G",
    ),
    Parameter::new(
        "patience",
        "Maximum time for a level to boot",
        Kind::Time {
            least: Duration::from_secs(10),
            most: Duration::from_secs(6 * 3600),
        },
        "5m",
    ),
    Parameter::new(
        "level",
        "Level of this machine; the experiment sets it when it runs in a deeper level",
        Kind::Count { least: 0, most: 16 },
        "0",
    )
    .rarely(),
];

impl Experiment for Levels {
    fn name(&self) -> &'static str {
        "nested"
    }

    fn about(&self) -> &'static str {
        "Nested machines, each started by the one before it: their depth and speed"
    }

    fn description(&self) -> &'static str {
        "Level 0 is this machine, which starts a machine (level 1) that has KVM, QEMU and this \
         program. Each level starts the next one from its own disks, which stay unmodified. \
         The experiment ends when --levels is reached, when a level does not boot within \
         --patience, or when no memory is left for another level. The run's problems then \
         show the reason, with the last lines of the console.\n\n\
         Each level has these measures: `boot`, the time until its agent answers; `sort`, \
         the CPU time to sort 100,000 numbers, and `slow-down`, the ratio to level 0; \
         `read`, the mean time of 4 KiB reads of the root disk with O_DIRECT, one at a \
         time; `exits`, the VM exits per read as the level below counts them, including \
         those of an idle machine.\n\n\
         Without hardware virtualisation level 1 is emulated (a CPU with AMD's SVM), and \
         level 2 is the first with KVM: one level less, and all levels as slow as the \
         first."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        Cell::new(settings).map(drop)
    }

    fn needs(&self, _settings: &Settings) -> Result<Vec<Need>> {
        let programs = ["qemu-storage-daemon", "mke2fs", "e2fsck", "fio"].map(Need::Program);
        Ok([&Need::GUEST[..], &programs].concat())
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        Cell::new(settings).map_or(Duration::ZERO, |cell| cell.patience * cell.levels / 2)
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Descent {
            fathom: context.fathom.clone(),
        })
    }
}

struct Cell {
    levels: u32,
    memory_mib: u32,
    patience: Duration,
    level: u32,
}

impl Cell {
    fn new(settings: &Settings) -> Result<Cell> {
        let memory = Settings::needed("memory", settings.size("memory")?)?;
        Ok(Cell {
            memory_mib: u32::try_from(memory >> 20)
                .map_err(|_| Error::Protocol("--memory: too much".into()))?,
            levels: Settings::needed("levels", settings.count("levels")?)?,
            patience: Settings::needed("patience", settings.time("patience")?)?,
            level: Settings::needed("level", settings.count("level")?)?,
        })
    }

    /// Time limit for the levels above this one: each may boot more than once, and does its work.
    fn limit(&self) -> Duration {
        (self.patience * 3 + AROUND) * (self.levels - self.level)
    }
}

struct Descent {
    fathom: PathBuf,
}

impl Session for Descent {
    fn cell(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let cell = Cell::new(settings)?;
        let mut found = Yield::default();
        let level = cell.level;
        let time = |name, unit, value| {
            let name = format!("level{level}.{name}");
            Measure::new(name, unit, value, Better::Lower)
        };
        found
            .measures
            .push(time(SORT, Unit::Seconds, probe::sorting()));
        if level > 0 {
            progress(&format!("{READS}{level}"));
            std::thread::sleep(PAUSE);
            let (count, mean) = probe::reads(&host::disk_on("/")?)?;
            std::thread::sleep(PAUSE);
            progress(&format!("{READ}{level}"));
            found
                .measures
                .push(time("read", Unit::Nanoseconds, mean).of(count));
        }
        if level < cell.levels {
            // Any failure from here on is a result of the experiment.
            if let Err(error) = self.deeper(&cell, settings, folder, &mut found, progress) {
                found.problems.extend(lines(level + 1, &error));
            }
        }
        if level == 0 {
            slow_downs(&mut found.measures);
            found.measures.insert(0, depth(&found.measures));
        }
        Ok(found)
    }
}

impl Descent {
    /// Boots the next level, and runs this experiment there.
    fn deeper(
        &self,
        cell: &Cell,
        settings: &Settings,
        folder: &Path,
        found: &mut Yield,
        progress: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let next = cell.level + 1;
        progress(&format!("booting level {next}"));
        let begin = Instant::now();
        let mut host = match cell.level {
            0 => {
                let best = Accelerator::detect();
                KvmHost::boot_by(best, cell.memory_mib, cell.patience, &self.fathom)?
            }
            _ => KvmHost::boot_same(memory_mib()?, cell.patience)?,
        };
        let seconds = begin.elapsed().as_secs_f64();
        let name = |what| format!("level{next}.{what}");
        let boot = Measure::new(name("boot"), Unit::Seconds, seconds, Better::Lower);
        found.measures.push(boot);
        let pid = host.pid();
        let (mut before, mut counted) = (None, None);
        let watch = &mut |step: &str| {
            if step == format!("{READS}{next}") {
                before = exits::of(pid);
            } else if step == format!("{READ}{next}") {
                counted = exits::of(pid).zip(before).map(|(now, before)| now - before);
            }
            progress(step);
        };
        let settings = settings.clone().with("level", next);
        let inner = run_within(&mut host, "nested", &settings, folder, cell.limit(), watch)?;
        let reads = { inner.measures.iter() }.find(|one| one.name == name("read"));
        if let (Some(exits), Some(reads)) = (counted, reads) {
            let each = exits as f64 / reads.samples.max(1) as f64;
            let exits = Measure::new(name("exits"), Unit::PerRequest, each, Better::Lower);
            found.measures.push(exits.of(reads.samples));
        }
        found.measures.extend(inner.measures);
        found.problems.extend(inner.problems);
        Ok(())
    }
}

/// Returns the memory for the next level, in MiB.
fn memory_mib() -> Result<u32> {
    let left = (host::available_memory()? >> 20).saturating_sub(KEPT_MIB);
    match left {
        0..LEAST_MIB => Err(Error::Protocol(format!(
            "no memory for another level: {left} MiB are left, and it takes {LEAST_MIB}"
        ))),
        // Rounded down to whole huge pages of 2 MiB.
        _ => Ok(u32::try_from(left & !1).unwrap_or(u32::MAX)),
    }
}

/// Returns the lines of an error that are kept: its first line, and the end of the rest.
fn lines(level: u32, error: &Error) -> Vec<String> {
    let text = error.to_string();
    let mut lines = text.lines();
    let first = format!("level {level}: {}", lines.next().unwrap_or_default());
    let rest: Vec<&str> = lines.collect();
    let from = rest.len().saturating_sub(SHOWN - 1);
    let rest = rest[from..].iter().map(|line| line.trim().to_owned());
    std::iter::once(first).chain(rest).collect()
}

/// Adds the ratio of each level's sort time to that of level 0.
fn slow_downs(measures: &mut Vec<Measure>) {
    let times = measures.iter().filter_map(|one| {
        let level = one.name.strip_suffix(&format!(".{SORT}"))?;
        Some((level.to_owned(), one.value))
    });
    let times: Vec<(String, f64)> = times.collect();
    let Some((_, base)) = times.iter().find(|(level, _)| level == "level0").cloned() else {
        return;
    };
    for (level, value) in times.into_iter().filter(|(level, _)| level != "level0") {
        let name = format!("{level}.slow-down");
        measures.push(Measure::new(name, Unit::Ratio, value / base, Better::Lower));
    }
}

/// Returns the deepest level that has reported measures.
fn depth(measures: &[Measure]) -> Measure {
    let level = |one: &Measure| {
        let level = one.name.strip_suffix(&format!(".{SORT}"))?;
        level.strip_prefix("level")?.parse::<u32>().ok()
    };
    let most = measures.iter().filter_map(level).max().unwrap_or(0);
    Measure::new("depth", Unit::Count, f64::from(most), Better::Higher)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_held_against_level_0() {
        let sort = |level: u32, seconds| {
            let name = format!("level{level}.{SORT}");
            Measure::new(name, Unit::Seconds, seconds, Better::Lower)
        };
        let mut measures = vec![sort(0, 2.0), sort(1, 50.0), sort(2, 60.0)];
        assert_eq!(depth(&measures).value, 2.0);
        slow_downs(&mut measures);
        let said = measures[3..]
            .iter()
            .map(|one| (one.name.as_str(), one.value));
        let wanted = [("level1.slow-down", 25.0), ("level2.slow-down", 30.0)];
        assert_eq!(said.collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn of_a_failure_its_begin_and_its_end_are_kept() {
        let text: Vec<String> = (0..100).map(|n| format!("  line {n}")).collect();
        let error = Error::Protocol(format!("no boot\n{}", text.join("\n")));
        let lines = lines(3, &error);
        assert_eq!(
            (lines.len(), lines[0].as_str()),
            (SHOWN, "level 3: no boot")
        );
        assert_eq!(lines[SHOWN - 1], "line 99");
    }
}
