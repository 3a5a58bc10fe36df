//! The KVM wiki's experiment of 2010: one vCPU reads 4 KiB at a time past the page cache, in the
//! guest and on the host, with every layer between them traced.

mod bed;
mod in_guest;
mod nested;
mod options;
mod round;

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use fathom_run::{Clocks, Disk, Environment, Round, Run, RunKind, Scenario, VERSION};

use crate::environment;
use crate::error::{Context, Error, Result};
use crate::host::{self, Accelerator};
use crate::kvm_host::KvmHost;
use crate::scratch::{self, Scratch};
use crate::tracers;
use crate::workload::{self, Limit};

pub use in_guest::{GuestRun, run as run_guest};
pub use nested::run_in;
pub use options::{Injection, Options, Place, Server, Transport};

use bed::Bed;
use round::{Plan, Watch};

/// In the run directory: what the server printed at its end (Fathom's times, in JSON), and the
/// guest's serial console.
const SERVER_LOG: &str = "server.log";
const CONSOLE_LOG: &str = "console.log";
/// The first that emulates SVM well enough for KVM.
const OLDEST_QEMU: (u32, u32) = (6, 0);
/// Operations before the first round, which may be no longer itself.
const WARM_UP: u64 = 100;

/// Runs the scenario and leaves its run directory at `options.output`. `progress` is told of
/// every step. On a machine without hardware virtualisation a KVM host is emulated and the run
/// happens there.
///
/// # Errors
/// Everything that can go wrong with images, servers and guests, with their last words. Rounds
/// that were complete are in the run directory then, if there were any.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<()> {
    options.check()?;
    host::need_qemu(OLDEST_QEMU)?;
    scratch::sweep();
    if Accelerator::detect() == Accelerator::Kvm {
        return here(options, progress);
    }
    if options.is_nested {
        return Err(Error::Protocol(
            "the emulated CPU has no SVM, so there is no KVM in the KVM host".into(),
        ));
    }
    progress(
        "no hardware virtualisation here (no vmx or svm): booting a KVM host in an emulated \
         machine; its times are stretched and tell nothing about speed",
    );
    let mut host = KvmHost::boot(&options.fathom)?;
    run_in(&mut host, options, progress)
}

/// Runs on this machine, which has KVM.
fn here(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<()> {
    fs::create_dir_all(&options.output)
        .context(|| format!("cannot create {}", options.output.display()))?;
    let mut run = new_run(options);
    let done = rounds(options, &mut run, progress);
    if let Err(error) = &done {
        run.problems.push(format!("the run ended early: {error}"));
    }
    // What was collected stays usable; without a round there is nothing to use.
    if run.rounds.is_empty() {
        let _ = fs::remove_dir_all(&options.output);
    } else {
        run.save(&options.output)?;
    }
    done
}

fn rounds(options: &Options, run: &mut Run, progress: &mut dyn FnMut(&str)) -> Result<()> {
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
    progress("powering the guest off");
    let log = |name: &str, text: &str| {
        let path = options.output.join(name);
        fs::write(&path, text).context(|| format!("cannot write {}", path.display()))
    };
    log(CONSOLE_LOG, &bed.guest.console().text())?;
    let said = bed.end()?;
    if said.is_empty() {
        Ok(())
    } else {
        log(SERVER_LOG, &said)
    }
}

/// Brings code and data of both sides into caches (and, where the CPU is emulated, through its
/// translator), so that the first round is like the others.
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

/// What is done, in order.
#[derive(Debug)]
enum Step {
    Guest(Plan),
    Host { name: String, positional: bool },
}

/// Pairs of a traced and an untraced round, so that the cost of tracing is seen, in alternating
/// order, so that a drift is not taken for it; between them the host's own figures.
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
            // The wiki's read(), and what the server's threads would call.
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
        if options.server == Server::Qemu {
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
    let stream = outcome.save(&folder, in_guest::BENCHMARK, true)?;
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
    // The guest's own words; of the traced rounds, which know more.
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

/// Tells of the disk and of the threads what is known of them by now.
fn describe(bed: &mut Bed, run: &mut Run) -> Result<()> {
    let found = bed.found()?;
    let mut disk = Disk {
        under_test: true,
        host: found.located.device.clone(),
        extents: found.located.extents.clone(),
        ..found.disk.clone()
    };
    // What the guest told of it stays.
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
    // Whoever reads the times must know.
    let through = match options.filters.as_slice() {
        [] => String::new(),
        filters => format!(" through {}", filters.join(" and ")),
    };
    Run {
        version: VERSION,
        kind: RunKind::Lab,
        title: format!(
            "wiki: {rw} of {block_size} bytes, depth {iodepth}, disk served by {server}{through}"
        ),
        created: now(),
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
            host: environment::machine("x86-tsc"),
            guest: None,
            accelerator: Accelerator::Kvm.name().into(),
            qemu: None,
            fathom: env!("CARGO_PKG_VERSION").into(),
            stretched: environment::is_stretched(),
        },
        disks: Vec::new(),
        threads: Vec::new(),
        rounds: Vec::new(),
        problems: Vec::new(),
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}

/// The name of a run directory that is made now: `fathom-wiki-20261121-044538.run` (UTC).
pub fn default_output() -> PathBuf {
    PathBuf::from(format!("fathom-wiki-{}.run", utc(now())))
}

/// The civil date of seconds since 1970, after Hinnant's `civil_from_days`: years begin in March,
/// so that the leap day comes last.
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let days = days + 719_468; // since 0000-03-01
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    let year = year + era * 400 + next;
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The oracle is date(1).
    #[test]
    fn dates_are_those_of_the_calendar() {
        for seconds in [
            0,
            951_782_399,
            951_782_400,
            951_868_800,
            1_790_000_000,
            4_107_542_399,
        ] {
            let at = format!("@{seconds}");
            let wanted = crate::host::run("date", &["-u", "-d", &at, "+%Y%m%d-%H%M%S"]).unwrap();
            assert_eq!(utc(seconds), wanted.trim());
        }
    }

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
        options.server = Server::Qemu;
        assert!(names(&options).ends_with(&["qemu".into(), "qemu-locks".into()]));
        options.pairs_only = true;
        assert_eq!(
            names(&options),
            ["control-1", "requests-1", "requests-2", "control-2"]
        );
    }
}
