//! Analyses a run directory.

use std::path::Path;

use fathom_run::{Clock, Kind, Round, Run, RunKind};

use crate::analysis::{Analysis, Exact, RoundRow, Truth};
use crate::clock::TimeBase;
use crate::impossible;
use crate::join::merge::{Merged, Side};
use crate::join::parts::pins;
use crate::join::sums::Sums;
use crate::join::survey::Survey;
use crate::join::{Counts, Joiner};
use crate::overhead::overheads;
use crate::threads::threads;
use crate::timing;
use crate::wiki::{Means, Served, Table};

/// The highest I/O port of a PC; memory-mapped doorbells have higher addresses.
const LAST_PORT: u64 = 0xffff;

/// Options of an analysis.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of the slowest requests that the report shows in full.
    pub slowest: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { slowest: 50 }
    }
}

/// Analyses a run directory. Limits of its events, and damage to them, are listed in
/// [`Analysis::problems`].
///
/// # Errors
/// Fails when `run.json` cannot be read; damaged event files are not an error.
pub fn analyse(dir: &Path, options: &Options) -> fathom_run::Result<Analysis> {
    let run = Run::load(dir)?;
    let mut work = Work::new(dir, &run, options);
    let surveys: Vec<Survey> = run
        .rounds
        .iter()
        .map(|round| Survey::of(dir, &run, round))
        .collect();
    let best = surveys.iter().map(Survey::depth).max().unwrap_or(0);
    for (round, survey) in run.rounds.iter().zip(&surveys) {
        for problem in &survey.problems {
            work.say(format!("{}: {problem}", round.name));
        }
        if round.on_host || !survey.is_useful() {
            continue;
        }
        work.round(round, survey, survey.depth() == best);
    }
    Ok(work.finish())
}

/// An analysis in progress.
struct Work<'a> {
    dir: &'a Path,
    run: &'a Run,
    sums: Sums,
    truth: Truth,
    /// Number of requests in the rounds so far; the offset of the next round's request numbers.
    requests: u64,
    joined_rounds: u64,
    counts: Counts,
    table: Table,
    problems: Vec<String>,
}

impl<'a> Work<'a> {
    fn new(dir: &'a Path, run: &'a Run, options: &Options) -> Work<'a> {
        Work {
            dir,
            run,
            sums: Sums::new(options.slowest),
            truth: Truth::default(),
            requests: 0,
            joined_rounds: 0,
            counts: Counts::default(),
            table: Table::default(),
            problems: run.problems.clone(),
        }
    }

    /// Adds a problem, unless it is already listed.
    fn say(&mut self, problem: impl Into<String>) {
        let problem = problem.into();
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    fn round(&mut self, round: &Round, survey: &Survey, join: bool) {
        let (time, doubt) = timing::time_base(self.dir, self.run, round, survey);
        if let Some(why) = doubt {
            self.say(format!("{}: {why}", round.name));
        }
        self.describe_clocks(round, &time);
        let mut merged = Merged::open(self.dir, round, &time, |_| true);
        let window = timing::common_window(self.run, survey, &time);
        let mut means = Means::new(self.run);
        let base = self.requests;
        let sums = &mut self.sums;
        let mut served = Served::default();
        let mut joiner = join.then(|| {
            Joiner::new(self.run, survey, &time, |mut way| {
                way.number += base;
                sums.add(&way);
                served.add(&way);
            })
        });
        while let Some(seen) = merged.next() {
            // A request sent to the other host within the window may have reached it afterwards.
            let is_late = seen.side == Side::Remote && seen.at > *window.end();
            if !window.contains(&seen.at) && !is_late {
                continue;
            }
            means.event(&seen, |ticks| time.ns(seen.clock, ticks));
            if let Some(joiner) = &mut joiner {
                joiner.event(&seen);
            }
        }
        let counts = joiner.map(Joiner::finish);
        let problems = std::mem::take(&mut merged.problems);
        for problem in problems {
            self.say(format!("{}: {problem}", round.name));
        }
        means.served(&served);
        self.table.add(round, &means);
        if let Some(counts) = counts {
            self.note_join(survey, &time, counts);
        }
    }

    fn describe_clocks(&mut self, round: &Round, time: &TimeBase) {
        let unknown = round.streams.iter().filter(|info| !time.knows(info.clock));
        for info in unknown {
            let why = match info.clock {
                Clock::HostTsc => "no two readings relate the host's TSC to CLOCK_MONOTONIC",
                clock @ Clock::RemoteTsc if time.remote_ns(clock, 0).is_none() => {
                    "no two readings relate the remote host's TSC to its CLOCK_MONOTONIC"
                }
                Clock::RemoteTsc | Clock::RemoteMonotonic => time.remote_method.as_str(),
                _ => time.method.as_str(),
            };
            self.problems
                .push(format!("{}: {} is left out: {why}", round.name, info.name));
        }
    }

    fn note_join(&mut self, survey: &Survey, time: &TimeBase, counts: Counts) {
        self.joined_rounds += 1;
        self.requests += counts.requests;
        self.counts.requests += counts.requests;
        self.counts.unmatched += counts.unmatched;
        self.counts.inconsistent += counts.inconsistent;
        self.counts.background += counts.background;
        self.counts.userspace += counts.userspace;
        self.counts.others += counts.others;
        self.counts.gone += counts.gone;
        self.counts.events += counts.events;
        self.counts.in_flight += counts.in_flight;
        let oldest = &mut self.counts.oldest_in_flight;
        *oldest = (*oldest).max(counts.oldest_in_flight);
        if survey.any(Side::Guest) {
            self.truth.clock_method = time.method.clone();
        }
        self.truth.clock_error_ns = self.truth.clock_error_ns.max(time.error);
        if survey.any(Side::Remote) {
            self.truth.remote_clock_method = Some(time.remote_method.clone());
            let error = time.remote_error;
            self.truth.remote_clock_error_ns = self.truth.remote_clock_error_ns.max(error);
        }
        for (name, lost) in &survey.lost {
            match self.truth.lost.iter_mut().find(|(known, _)| known == name) {
                Some((_, sum)) => *sum += lost,
                None => self.truth.lost.push((name.clone(), *lost)),
            }
        }
        if survey.guest_dev_guessed {
            self.say(
                "the guest's disk was not named: the report uses the disk with the most requests",
            );
        }
        self.say_what_was_not_watched(survey);
        if self.counts.gone > 0 && !survey.any(Side::Remote) {
            self.say(
                "the disk's requests were sent to another server: record that server at the same time (fathom \
                 breakdown --server) and use --join, to show the network, that server and its I/O",
            );
        }
    }

    fn say_what_was_not_watched(&mut self, survey: &Survey) {
        let guest = survey.any(Side::Guest);
        let disk = self.run.disk();
        let identified =
            disk.is_some_and(|disk| !disk.doorbells.is_empty() || !disk.kick_eventfds.is_empty());
        if survey.doorbells() && !identified {
            self.say(
                "the disk's doorbells are not known: its kicks cannot be distinguished from those of \
                 other devices, and are left out",
            );
        }
        let is_port = |disk: &fathom_run::Disk| disk.doorbells.iter().any(|&at| at <= LAST_PORT);
        if disk.is_some_and(is_port) {
            self.say("the disk's doorbell is an I/O port (legacy virtio): its kicks are kvm_pio");
        }
        let pins = disk.map(pins).unwrap_or_default();
        if survey.host(Kind::KvmSetIrq)
            && let Some(pin) = pins.first()
        {
            self.say(format!(
                "the disk's interrupt is legacy (INTx, pin {pin} of the IO-APIC): interrupts of devices \
                 that share the pin cannot be distinguished"
            ));
        }
        let is_vcpu = |thread: &fathom_run::Thread| thread.role == fathom_run::Role::Vcpu;
        let has_guest = self.run.threads.iter().any(is_vcpu) || guest;
        if !survey.doorbells() && self.run.kind != RunKind::Guest && has_guest {
            self.say(
                "KVM's kicks and interrupts were not watched (no KVM, or its events are not \
                 traced): the way from the guest to the server and back is one layer each",
            );
        } else if guest && !survey.host(Kind::KvmEntry) && survey.doorbells() {
            self.say("no kvm_entry events: waking a vCPU is part of the interrupt's layer");
        }
        let hosts_disk = disk.is_some_and(|disk| disk.host.is_some());
        if hosts_disk && !survey.host(Kind::BlockRqIssue) && self.run.kind != RunKind::Guest {
            self.say("no requests of the host's block layer were seen: its device is one layer with the rest of the I/O");
        }
        if let Some(disk) = disk.filter(|disk| hosts_disk && disk.extents.is_empty())
            && survey.host(Kind::BlockRqIssue)
        {
            self.say(format!(
                "{}: the places of its bytes on the host's device are not known: only I/O that the \
                 server's own threads issued counts as the disk's, which includes the server's other \
                 disks on that device",
                disk.name
            ));
        }
        if self.counts.userspace > 0 {
            self.say(format!(
                "{} kicks went to user space: the disk has no ioeventfd",
                self.counts.userspace
            ));
        }
    }

    /// Adds the findings that make a table unreliable to the problems.
    fn say_what_is_wrong(&mut self, exact: &Exact) {
        let truth = &exact.truth;
        let percent = |n: u64| n as f64 * 100.0 / truth.requests.max(1) as f64;
        let mut lines = Vec::new();
        for (name, lost) in &truth.lost {
            lines.push(format!(
                "{name}: {lost} events were dropped: requests are missing, and the tails cannot be \
                 trusted"
            ));
        }
        let told = [
            (truth.unmatched, "could not be followed through all layers"),
            (truth.ambiguous, "had more than one possible counterpart"),
            (truth.incomplete, "lack an event that others have"),
        ];
        for (count, what) in told {
            if count > 0 {
                lines.push(format!(
                    "{count} of {} requests ({:.2}%) {what}",
                    truth.requests,
                    percent(count)
                ));
            }
        }
        if let Some(oldest) = truth.oldest_in_flight_ns {
            lines.push(format!(
                "in flight at end: {}, oldest {:.3} ms",
                truth.in_flight,
                oldest as f64 / 1e6
            ));
        }
        if truth.inconsistent > 0 {
            lines.push(format!(
                "{} events contradict the others: events are missing or damaged",
                truth.inconsistent
            ));
        }
        if truth.violations > 0 {
            let error = truth
                .clock_error_ns
                .max(truth.remote_clock_error_ns)
                .unwrap_or(0);
            lines.push(format!(
                "{} effects were seen before their causes by more than the clocks' error of \
                 {error} ns",
                truth.violations
            ));
        }
        if self.counts.others > 0 {
            lines.push(format!(
                "{} requests to the remote disk have no counterpart here: requests of other clients or of \
                 another time, flushes of this server, or parts of requests that were sent as several commands",
                self.counts.others
            ));
        }
        if self.counts.background > 0 {
            lines.push(format!(
                "{} requests to the disk were not the benchmark's",
                self.counts.background
            ));
        }
        for line in lines {
            self.say(line);
        }
    }

    fn finish(mut self) -> Analysis {
        let run = self.run;
        let exact = (self.joined_rounds > 0).then(|| {
            let mut exact = std::mem::replace(&mut self.sums, Sums::new(0)).finish();
            exact.truth = Truth {
                requests: self.counts.requests,
                unmatched: self.counts.unmatched,
                inconsistent: self.counts.inconsistent,
                in_flight: self.counts.in_flight,
                oldest_in_flight_ns: self.counts.oldest_in_flight,
                clock_method: std::mem::take(&mut self.truth.clock_method),
                clock_error_ns: self.truth.clock_error_ns,
                remote_clock_method: self.truth.remote_clock_method.take(),
                remote_clock_error_ns: self.truth.remote_clock_error_ns,
                lost: std::mem::take(&mut self.truth.lost),
                ..exact.truth
            };
            let names: Vec<&str> = { exact.layers.iter() }
                .map(|row| exact.name_of(row.layer))
                .collect();
            for (row, name) in exact.layers.iter_mut().zip(names) {
                row.name = name;
            }
            exact
        });
        if let Some(exact) = &exact {
            self.say_what_is_wrong(exact);
        }
        let exact = exact.filter(|exact| exact.total.count > 0);
        let only_qemu = run.kind == RunKind::Qemu;
        if exact.is_none() && !only_qemu {
            self.say("no request could be followed: there is no exact breakdown");
        }
        let threads = threads(self.dir, run);
        let with_qemu =
            |round: &&Round| !round.on_host && round.streams.iter().any(|info| info.name == "qemu");
        // The wiki's table needs a benchmark besides QEMU's own times.
        if let Some(round) = run.rounds.iter().find(with_qemu).filter(|_| !only_qemu) {
            self.table.add_qemu(round, &threads.qemu);
        }
        for problem in threads.problems {
            self.say(problem);
        }
        let wiki = std::mem::take(&mut self.table).finish(run);
        for error in impossible::sums(exact.as_ref(), wiki.as_ref()) {
            self.say(error);
        }
        Analysis {
            kind: run.kind,
            title: run.title.clone(),
            created: run.created,
            scenario: run.scenario.clone(),
            environment: run.environment.clone(),
            disks: run.disks.clone(),
            rounds: run.rounds.iter().map(row).collect(),
            exact,
            wiki,
            calls: threads.calls,
            locks: threads.locks,
            qemu: threads.qemu,
            time_lines: threads.time_lines,
            picture: threads.picture,
            overhead: overheads(&run.rounds),
            problems: self.problems,
        }
    }
}

fn row(round: &Round) -> RoundRow {
    RoundRow {
        name: round.name.clone(),
        traced: round.traced.clone(),
        on_host: round.on_host,
        benchmark: round.benchmark.clone(),
    }
}
