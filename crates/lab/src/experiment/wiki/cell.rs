//! A cell: traced and untraced rounds in one guest, and rounds on the host.

use std::fs;

use fathom_run::{Clocks, Disk, Environment, Round, Run, RunKind, Scenario};

use super::bed::{self, Bed};
use super::in_guest::BENCHMARK;
use super::options::Options;
use super::round::{self, Plan, Watch};
use crate::bed::Seen;
use crate::environment;
use crate::error::{Context, Result};
use crate::host::Accelerator;
use crate::scratch::Scratch;
use crate::tracers;
use crate::workload::{self, Limit};

/// Files in the breakdown: the output of the server at its end (Fathom's times, in JSON), and the
/// guest's serial console.
const SERVER_LOG: &str = "server.log";
const CONSOLE_LOG: &str = "console.log";
/// Maximum number of operations before the first round.
const WARM_UP: u64 = 100;

/// Runs a cell on this machine, which has KVM, and writes its breakdown to `options.output`.
///
/// Calls `progress` at each step. Returns observations of an untraced round, if there was one.
///
/// # Errors
/// Any failure of images, servers and guests, with their last output. Rounds that were complete
/// before are saved.
pub(super) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Option<Seen>> {
    options.check()?;
    fs::create_dir_all(&options.output)
        .context(|| format!("cannot create {}", options.output.display()))?;
    let mut run = new_run(options);
    let done = rounds(options, &mut run, progress);
    if let Err(error) = &done {
        run.problems.push(format!("the run ended early: {error}"));
    }
    // Complete rounds stay usable. Without a round, nothing is.
    if run.rounds.is_empty() {
        let _ = fs::remove_dir_all(&options.output);
    } else {
        run.save(&options.output)?;
    }
    done
}

fn rounds(
    options: &Options,
    run: &mut Run,
    progress: &mut dyn FnMut(&str),
) -> Result<Option<Seen>> {
    let mut bed = Bed::make(options, progress)?;
    describe(&mut bed, run)?;
    run.environment.qemu.clone_from(&bed.attached.version);
    let located = &bed.found()?.located.problems;
    run.problems.extend(located.iter().cloned());
    run.problems.extend(bed.attached.problems.iter().cloned());
    warm_up(&mut bed, options)?;
    let steps = steps(options);
    for (index, step) in steps.iter().enumerate() {
        let round = match step {
            Step::Host { name, positional } => on_host(&bed, options, name, *positional)?,
            Step::Guest(plan) => in_guest(&mut bed, options, plan, run)?,
        };
        let figures = round
            .benchmark
            .as_ref()
            .map(bed::figures)
            .unwrap_or_default();
        let (number, count) = (index + 1, steps.len());
        progress(&format!(
            "round {number} of {count}, {}: {figures}",
            round.name
        ));
        run.rounds.push(round);
        run.save(&options.output)?;
    }
    // This round is last, because its probe of kicks stays active in the guest.
    let seen = match options.pairs_only {
        true => None,
        false => {
            progress("the same once more, untraced, to see what limits it");
            Some(round::observed(&mut bed, options)?)
        }
    };
    progress("powering the guest off");
    let log = |name: &str, text: &str| {
        let path = options.output.join(name);
        fs::write(&path, text).context(|| format!("cannot write {}", path.display()))
    };
    log(CONSOLE_LOG, &bed.vm.guest.console().text())?;
    let said = bed.vm.end()?;
    if !said.is_empty() {
        log(SERVER_LOG, &said)?;
    }
    Ok(seen)
}

/// Runs some operations, so that the first round is like the others: code and data of both sides
/// are then in caches, and emulated CPUs have translated the code.
fn warm_up(bed: &mut Bed, options: &Options) -> Result<()> {
    let count = match options.limit() {
        Limit::Operations(count) => count.min(WARM_UP),
        Limit::Time(_) => WARM_UP,
    };
    let few = Options {
        limit: Some(Limit::Operations(count)),
        inject: None,
        ..options.clone()
    };
    let dir = Scratch::small()?;
    let plan = Plan {
        name: "warm-up".into(),
        watch: Watch::Requests,
    };
    round::in_guest(bed, &few, &plan, dir.path())?;
    workload::run(&bed.host_workload(&few, true))?;
    Ok(())
}

/// A step of the cell.
#[derive(Debug)]
enum Step {
    Guest(Plan),
    Host { name: String, positional: bool },
}

/// Returns the steps: pairs of a traced and an untraced round, and the host's rounds in between.
///
/// The pairs show the cost of tracing. The order within the pairs alternates, so that a drift does
/// not look like that cost.
fn steps(options: &Options) -> Vec<Step> {
    let guest = |name: String, watch| Step::Guest(Plan { name, watch });
    let mut steps = Vec::new();
    for number in 1..=options.rounds {
        let mut pair = vec![
            guest(format!("control-{number}"), Watch::Nothing),
            guest(format!("requests-{number}"), Watch::Requests),
        ];
        if number % 2 == 0 {
            pair.reverse();
        }
        steps.append(&mut pair);
        if !options.pairs_only && options.iodepth == 1 && !options.rw.is_random() {
            // The wiki's call, read(), and the call that the server's threads would use.
            for (call, positional) in [("read", false), ("pread", true)] {
                let name = format!("host-{call}-{number}");
                steps.push(Step::Host { name, positional });
            }
        } else if !options.pairs_only {
            let name = format!("host-{number}");
            steps.push(Step::Host {
                name,
                positional: true,
            });
        }
    }
    if !options.pairs_only {
        steps.push(guest("syscalls".into(), Watch::Syscalls));
        if options.server.is_in_qemu() {
            steps.push(guest("qemu".into(), Watch::Qemu));
            steps.push(guest("qemu-locks".into(), Watch::QemuLocks));
        }
    }
    steps
}

fn on_host(bed: &Bed, options: &Options, name: &str, positional: bool) -> Result<Round> {
    let folder = options.output.join(name);
    fs::create_dir_all(&folder).context(|| format!("cannot create {}", folder.display()))?;
    let outcome = workload::run(&bed.host_workload(options, positional))?;
    let stream = outcome.save(&folder, BENCHMARK, true)?;
    Ok(Round {
        name: name.to_owned(),
        traced: Vec::new(),
        on_host: true,
        benchmark: Some(outcome.benchmark.clone()),
        clocks: Clocks {
            host: outcome.pairs.to_vec(),
            realtime_minus_monotonic_ns: tracers::realtime_minus_monotonic_ns(),
            ..Clocks::default()
        },
        streams: vec![stream],
    })
}

fn in_guest(bed: &mut Bed, options: &Options, plan: &Plan, run: &mut Run) -> Result<Round> {
    let outcome = round::in_guest(bed, options, plan, &options.output)?;
    describe(bed, run)?;
    let round = outcome.round;
    for problem in outcome.problems {
        let line = format!("{}: {problem}", round.name);
        run.problems.push(line);
    }
    // The guest describes itself. Traced rounds know more than others.
    let is_first = run.environment.guest.is_none();
    if is_first || plan.watch == Watch::Requests {
        run.environment.guest = outcome.guest.environment.guest;
        if let Some(seen) = outcome.guest.disks.into_iter().find(|disk| disk.under_test)
            && let Some(disk) = run.disks.iter_mut().find(|disk| disk.under_test)
        {
            disk.guest_dev = seen.guest_dev;
            disk.guest_name = seen.guest_name;
            disk.guest_irqs = seen.guest_irqs;
            disk.guest_vqs = seen.guest_vqs;
        }
    }
    Ok(round)
}

/// Copies to the run what is known of the disk and the threads by now.
fn describe(bed: &mut Bed, run: &mut Run) -> Result<()> {
    let found = bed.found()?;
    run.problems.extend(found.look_at_extents());
    let mut disk = Disk {
        under_test: true,
        ..found.disk.clone()
    };
    // Values that the guest has reported about the disk are kept.
    if let Some(known) = run.disk() {
        disk.guest_dev = known.guest_dev;
        disk.guest_name.clone_from(&known.guest_name);
        disk.guest_irqs.clone_from(&known.guest_irqs);
        disk.guest_vqs.clone_from(&known.guest_vqs);
    }
    run.disks = vec![disk];
    run.threads.clone_from(&bed.attached.threads);
    Ok(())
}

fn new_run(options: &Options) -> Run {
    let Options {
        server,
        rw,
        block_size,
        iodepth,
        ..
    } = options;
    // Filters change the times, so the title names them.
    let through = match options.filters.as_slice() {
        [] => String::new(),
        filters => format!(" through {}", filters.join(" and ")),
    };
    let title = format!(
        "wiki: {rw} of {block_size} bytes, depth {iodepth}, disk served by {server}{through}"
    );
    Run {
        scenario: Some(Scenario {
            rw: rw.to_string(),
            block_size: *block_size,
            iodepth: *iodepth,
            queues: options.queues.into(),
            server: server.to_string(),
            aio: options.aio.name().into(),
            cache: "none".into(),
            polling: options.poll,
        }),
        environment: Environment {
            accelerator: Accelerator::Kvm.name().into(),
            ..environment::here("x86-tsc")
        },
        ..Run::new(RunKind::Lab, title)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Kind;

    #[test]
    fn pairs_alternate_and_other_rounds_stand_alone() {
        let mut options = Options::new("/f", "/o");
        options.rounds = 2;
        let names = |options: &Options| -> Vec<String> {
            steps(options)
                .into_iter()
                .map(|step| match step {
                    Step::Guest(plan) => plan.name,
                    Step::Host { name, .. } => name,
                })
                .collect()
        };
        let wanted = "control-1 requests-1 host-read-1 host-pread-1 \
                      requests-2 control-2 host-read-2 host-pread-2 syscalls";
        assert_eq!(names(&options).join(" "), wanted);
        options.server = Kind::Qemu;
        assert!(names(&options).ends_with(&["qemu".into(), "qemu-locks".into()]));
        options.pairs_only = true;
        assert_eq!(
            names(&options),
            ["control-1", "requests-1", "requests-2", "control-2"]
        );
    }
}
