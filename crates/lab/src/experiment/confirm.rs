//! Trials: test a suspected limiter by changing it and running the same cell again.
//!
//! With more of a limiting resource, the cell does more work. A cell that only waits for latency
//! does more work with more requests in flight. A device at its limit does no more work, however
//! many requests it gets. The limits of a control group are lifted. Other suspected limiters (other
//! programs' load, steal, a filter) cannot be changed from here.

use fathom_limiter::{CPU_CAP, IO_CAP, judge};
use fathom_run::evidence::{Evidence, ThreadRole};
use fathom_run::{Cell, Expects, Planned, Trial};

use super::{Experiment, Settings};
use crate::error::Result;
use crate::evidence;
use crate::restore_settings::ChangedSetting;

/// End of a trial's id, which begins with the cell's id.
const SUFFIX: &str = "-confirm";

/// Names of the parameters with one meaning.
const DEPTH: &[&str] = &["iodepth"];
const LOAD_THREADS: &[&str] = &["threads"];
const VCPUS: &[&str] = &["cpus", "vcpus"];
const IO_THREADS: &[&str] = &["iothreads"];

/// Plans the trial of a cell's suspected limiter. Returns `None` if no limiter is suspected, or if
/// the experiment has no parameter that changes it.
pub fn trial(experiment: &dyn Experiment, cell: &Cell) -> Option<Trial> {
    let evidence = cell.evidence.as_ref()?;
    let limiter = judge(evidence).limiter?;
    let before = Settings(cell.planned.settings.clone());
    let twice = |names| twice(experiment, &before, names);
    let more_work = || twice(DEPTH).or_else(|| twice(LOAD_THREADS));
    let (settings, expects) = match limiter.rule {
        "latency" => (more_work()?, Expects::More),
        "device" => (more_work()?, Expects::NoMore),
        "load-thread" => (twice(LOAD_THREADS)?, Expects::More),
        CPU_CAP | IO_CAP => (before.clone(), Expects::More),
        "thread" => {
            let settings = match role(evidence, limiter.subject.as_deref()?)? {
                ThreadRole::Vcpu => twice(VCPUS)?,
                ThreadRole::Io => more_io_threads(experiment, &before)?,
                _ => return None,
            };
            (settings, Expects::More)
        }
        _ => return None,
    };
    experiment.check(&settings).ok()?;
    Some(Trial {
        planned: Planned {
            id: format!("{}{SUFFIX}", cell.planned.id),
            round: cell.planned.round,
            settings: settings.0,
        },
        of: cell.planned.id.clone(),
        limiter: limiter.rule.to_owned(),
        expects,
    })
}

/// Changes this machine for a trial: lifts a group's limit until the returned value is dropped.
///
/// # Errors
/// If the limit cannot be lifted.
pub fn lift(trial: &Trial, cell: &Cell) -> Result<Option<ChangedSetting>> {
    let Some(evidence) = &cell.evidence else {
        return Ok(None);
    };
    match (&*trial.limiter, &evidence.cgroup, &evidence.io_limit) {
        (CPU_CAP, Some(group), _) => evidence::lift_cpu_limit(&group.group).map(Some),
        (IO_CAP, _, Some(limit)) => evidence::lift_io_limit(limit).map(Some),
        _ => Ok(None),
    }
}

/// Describes what a trial changes of a cell: `iodepth=2`.
pub fn changed(trial: &Trial, cell: &Cell) -> String {
    match &*trial.limiter {
        CPU_CAP => return "without the CPU limit".into(),
        IO_CAP => return "without the I/O limit".into(),
        _ => (),
    }
    fathom_run::changed(&cell.planned.settings, &trial.planned.settings)
}

fn role(evidence: &Evidence, name: &str) -> Option<ThreadRole> {
    let thread = evidence.threads.iter().find(|one| one.name == name)?;
    Some(thread.role)
}

/// Doubles the first of these parameters that the experiment has. A value that the experiment
/// chooses counts as 1.
fn twice(experiment: &dyn Experiment, before: &Settings, names: &[&str]) -> Option<Settings> {
    let mut parameters = experiment.parameters().iter();
    let parameter = parameters.find(|one| names.contains(&one.name))?;
    let count: u64 = before.count(parameter.name).ok()?.unwrap_or(1);
    let value = parameter.value(&count.checked_mul(2)?.to_string()).ok()?;
    Some(before.clone().with(parameter.name, value))
}

/// Doubles the I/O threads. Each thread serves a queue, and a CPU of the guest uses each queue, so
/// that queues and CPUs are added if there are too few.
fn more_io_threads(experiment: &dyn Experiment, before: &Settings) -> Option<Settings> {
    let mut settings = twice(experiment, before, IO_THREADS)?;
    let threads: u64 = settings.count(IO_THREADS[0]).ok()??;
    for name in ["queues", "cpus"] {
        let is_less = |count: Option<u64>| count.is_some_and(|count| count < threads);
        if settings.count(name).is_ok_and(is_less) {
            settings = settings.with(name, threads);
        }
    }
    Some(settings)
}

#[cfg(test)]
mod tests {
    use super::super::find;
    use super::*;
    use fathom_run::evidence::{DeviceTime, Layer, Load, Processors, ThreadTime};

    /// A cell of experiment `settings` with some values changed: 10 s with one request of 100 us at
    /// a time, of which the disk takes 90 us.
    fn cell(changed: &[(&str, &str)], change: fn(&mut Evidence)) -> Cell {
        let mut settings = Settings::defaults(find("settings").unwrap().parameters());
        for (name, value) in changed {
            settings = settings.with(name, value);
        }
        let mut evidence = Evidence {
            seconds: 10.0,
            load: Load {
                threads: 1,
                depth: 1,
                requests: 98_000,
                bytes: 98_000 * 4096,
                mean_ns: 1e5,
                thread_cpu: vec![1.0],
                ..Load::default()
            },
            host: Some(Processors {
                busy: vec![20.0; 4],
                steal: vec![0.0; 4],
            }),
            threads: vec![ThreadTime {
                name: "worker 0".into(),
                role: ThreadRole::Io,
                cpu: 2.0,
                ..ThreadTime::default()
            }],
            layers: vec![Layer {
                name: "host: device".into(),
                mean_ns: 0.9e5,
            }],
            ..Evidence::default()
        };
        change(&mut evidence);
        Cell {
            planned: Planned {
                id: "3-2".into(),
                round: 2,
                settings: settings.0,
            },
            evidence: Some(evidence),
            ..Cell::default()
        }
    }

    fn tried(changes: &[(&str, &str)], change: fn(&mut Evidence)) -> Option<(Trial, String)> {
        let cell = cell(changes, change);
        let trial = trial(find("settings").unwrap(), &cell)?;
        let changed = changed(&trial, &cell);
        Some((trial, changed))
    }

    #[test]
    fn latency_is_tried_by_twice_the_depth() {
        let (trial, changed) = tried(&[], |_| ()).unwrap();
        assert_eq!((&*trial.limiter, &*changed), ("latency", "iodepth=2"));
        assert_eq!(trial.expects, Expects::More);
        assert_eq!((&*trial.planned.id, &*trial.of), ("3-2-confirm", "3-2"));
        assert_eq!(trial.planned.round, 2);
        // Twice the maximum is not a valid value.
        let most = [("iodepth", "1024"), ("ioengine", "libaio")];
        let trial = tried(&most, |evidence| evidence.load.depth = 1);
        assert_eq!(trial.map(|(_, changed)| changed), Some("threads=2".into()));
    }

    #[test]
    fn a_device_at_its_limit_does_no_more() {
        let (trial, changed) = tried(&[("iodepth", "32")], |evidence| {
            evidence.load.depth = 32;
            evidence.load.requests *= 32;
            evidence.load.bytes *= 32;
            evidence.device = Some(DeviceTime {
                name: "sdb".into(),
                requests: evidence.load.requests,
                bytes: evidence.load.bytes,
                utilisation: 100.0,
                in_flight: 31.0,
                mean_ns: 0.98e5,
                queue: None,
                queues: None,
                own_bytes: None,
            });
            evidence.bare = Some(fathom_run::evidence::Bare {
                requests_per_second: evidence.load.requests as f64 / 10.0,
                bytes_per_second: evidence.load.bytes as f64 / 10.0,
                mean_ns: 1e5,
            });
        })
        .unwrap();
        assert_eq!((&*trial.limiter, &*changed), ("device", "iodepth=64"));
        assert_eq!(trial.expects, Expects::NoMore);
    }

    #[test]
    fn a_busy_thread_gets_another() {
        let busy = |evidence: &mut Evidence| evidence.threads[0].cpu = 9.9;
        let fathom = [("disk", "fathom")];
        let (trial, changed) = tried(&fathom, busy).unwrap();
        assert_eq!(
            (&*trial.limiter, &*changed),
            ("thread", "cpus=2, iothreads=2, queues=2")
        );
        // QEMU's main loop cannot be doubled.
        assert_eq!(tried(&[], busy), None);
        let vcpu = tried(&[("cpus", "4")], |evidence| {
            evidence.threads[0].cpu = 9.9;
            evidence.threads[0].role = ThreadRole::Vcpu;
        });
        assert_eq!(vcpu.unwrap().1, "cpus=8");
    }

    #[test]
    fn a_limit_is_lifted_and_nothing_else_changed() {
        let capped = |evidence: &mut Evidence| {
            evidence.cgroup = Some(fathom_run::evidence::Throttling {
                group: "/of-somebody-else".into(),
                periods: 100,
                throttled: 90,
                seconds: 7.0,
            });
        };
        let (trial, words) = tried(&[], capped).unwrap();
        assert_eq!(
            (&*trial.limiter, &*words),
            (CPU_CAP, "without the CPU limit")
        );
        let cell = cell(&[], capped);
        assert_eq!(trial.planned.settings, cell.planned.settings);
        // A run directory may come from another machine.
        assert!(lift(&trial, &cell).is_err());
    }

    #[test]
    fn an_io_limit_is_lifted_and_nothing_else_changed() {
        let capped = |evidence: &mut Evidence| {
            evidence.io_limit = Some(fathom_run::evidence::IoLimit {
                group: "/of-somebody-else".into(),
                device: "sdb".into(),
                kind: fathom_run::evidence::IoLimitKind::Reads,
                allowed: 9800.0,
                used: 98_000,
            });
        };
        let (trial, words) = tried(&[], capped).unwrap();
        assert_eq!(
            (&*trial.limiter, &*words),
            (IO_CAP, "without the I/O limit")
        );
        let cell = cell(&[], capped);
        assert_eq!(trial.planned.settings, cell.planned.settings);
        assert!(lift(&trial, &cell).is_err());
    }

    #[test]
    fn nothing_is_tried_without_a_suspect_or_a_setting() {
        assert_eq!(tried(&[], |evidence| evidence.load.requests /= 10), None);
        // Where the time goes is not known.
        assert_eq!(tried(&[], |evidence| evidence.layers.clear()), None);
        let mut without = cell(&[], |_| ());
        without.evidence = None;
        assert_eq!(trial(find("settings").unwrap(), &without), None);
        let latency = cell(&[], |_| ());
        assert_eq!(trial(find("bonnie").unwrap(), &latency), None);
    }
}
