//! One run directory from a host's and a guest's, recorded at the same time.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use fathom_run::{Clocks, Environment, Round, Run, RunKind, VERSION};

use crate::error::{Context, Error, Result};
use crate::tracers::{guest, kvm};

const JOINED: &str = "joined";

/// Makes a run directory of a host's and a guest's: the guest's events come to the round in which
/// the host watched KVM. Whether they overlap in time is for the report to find out.
///
/// # Errors
/// When one of the two is not what it should be, or the new one cannot be written.
pub fn join(host_dir: &Path, guest_dir: &Path, output: &Path) -> Result<Run> {
    let host = load(
        host_dir,
        RunKind::Host,
        "a host's run (fathom breakdown --pid)",
    )?;
    let guest = load(
        guest_dir,
        RunKind::Guest,
        "a guest's run (fathom guest record)",
    )?;
    if output.join("run.json").exists() {
        return Err(Error::Unusable {
            path: output.to_owned(),
            reason: "it holds a run already; name a new folder".into(),
        });
    }
    let mut rounds = Vec::new();
    let best = best_round(&host);
    let inside = guest.rounds.iter().find(|round| has(round, guest::NAME));
    let inside = inside.or(guest.rounds.first());
    for (index, round) in host.rounds.iter().enumerate() {
        let mut round = round.clone();
        if Some(index) == best {
            round.name = JOINED.into();
        }
        let folder = output.join(&round.name);
        copy(host_dir, &host.rounds[index], &folder)?;
        if let Some(inside) = inside.filter(|_| Some(index) == best) {
            copy(guest_dir, inside, &folder)?;
            add(&mut round, inside);
        }
        rounds.push(round);
    }
    let run = Run {
        version: VERSION,
        kind: RunKind::Joined,
        title: host.title.clone(),
        created: host.created,
        experiment: None,
        scenario: guest.scenario.clone().or(host.scenario.clone()),
        environment: Environment {
            guest: guest.environment.guest.clone(),
            ..host.environment.clone()
        },
        disks: disks(&host, &guest),
        threads: host.threads.clone(),
        rounds,
        problems: problems(&host, &guest),
    };
    run.save(output)?;
    Ok(run)
}

fn load(dir: &Path, kind: RunKind, what: &str) -> Result<Run> {
    let run = Run::load(dir)?;
    if run.kind != kind || run.rounds.is_empty() {
        return Err(Error::Unusable {
            path: dir.to_owned(),
            reason: format!("it is not {what}; the host's comes first, then the guest's"),
        });
    }
    Ok(run)
}

fn has(round: &Round, name: &str) -> bool {
    round.traced.iter().any(|one| one == name)
}

/// The host's round that the guest's belongs to.
fn best_round(host: &Run) -> Option<usize> {
    let watched = host.rounds.iter().position(|round| has(round, kvm::NAME));
    watched.or((!host.rounds.is_empty()).then_some(0))
}

/// Copies the files of a round of the run in `dir`.
fn copy(dir: &Path, round: &Round, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).context(|| format!("cannot create {}", folder.display()))?;
    for stream in &round.streams {
        let mut from = round.file(dir, stream)?;
        let to = folder.join(stream.file_name());
        // Two files of one name would become one.
        let copied = File::create_new(&to).and_then(|mut to| io::copy(&mut from, &mut to));
        copied.context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(())
}

fn add(round: &mut Round, inside: &Round) {
    round.traced.extend(inside.traced.iter().cloned());
    round.benchmark = inside.benchmark.clone();
    round.streams.extend(inside.streams.iter().cloned());
    round.clocks = Clocks {
        guest: inside.clocks.guest.clone(),
        ..round.clocks.clone()
    };
}

/// The host's disks; the one under test with what the guest knows of its own.
fn disks(host: &Run, guest: &Run) -> Vec<fathom_run::Disk> {
    let mut disks = host.disks.clone();
    let Some(inside) = guest.disk() else {
        return disks;
    };
    if let Some(disk) = disks.iter_mut().find(|disk| disk.under_test) {
        disk.guest_dev = inside.guest_dev;
        disk.guest_name = inside.guest_name.clone();
        disk.guest_irqs = inside.guest_irqs.clone();
        disk.guest_vqs = inside.guest_vqs.clone();
    }
    disks
}

fn problems(host: &Run, guest: &Run) -> Vec<String> {
    let of = |side: &'static str, run: &Run| {
        let lines = run.problems.clone().into_iter();
        lines.map(move |line| format!("{side}: {line}"))
    };
    let mut problems: Vec<String> = of("host", host).chain(of("guest", guest)).collect();
    if guest.disk().is_none() {
        problems.push("guest: no disk was chosen there; its requests cannot be joined".into());
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_run::{Clock, Disk, Event, Kind, Pair, StreamInfo, StreamWriter};

    fn make(dir: &Path, kind: RunKind, name: &str, disk: Disk) {
        let stream = StreamInfo {
            name: name.into(),
            clock: Clock::HostTsc,
            events: 1,
            lost: Some(0),
        };
        let pair = Pair {
            tsc: 1,
            monotonic_ns: 2,
        };
        let mut clocks = Clocks::default();
        if kind == RunKind::Guest {
            clocks.guest.push(pair);
        } else {
            clocks.host.push(pair);
        }
        let round = Round {
            name: "round".into(),
            traced: vec![name.into()],
            clocks,
            streams: vec![stream],
            ..Round::default()
        };
        fs::create_dir_all(dir.join("round")).unwrap();
        let path = dir.join(format!("round/{name}.events"));
        let mut writer = StreamWriter::create(&path, 1, Vec::new()).unwrap();
        writer.push(&Event::new(1, Kind::Lost, 0, 0, &[1])).unwrap();
        writer.finish().unwrap();
        let run = Run {
            version: VERSION,
            kind,
            title: "t".into(),
            created: 1,
            experiment: None,
            scenario: None,
            environment: Environment::default(),
            disks: vec![disk],
            threads: Vec::new(),
            rounds: vec![round],
            problems: vec!["p".into()],
        };
        run.save(dir).unwrap();
    }

    #[test]
    fn the_guests_events_come_to_the_hosts() {
        let dir = tempfile::tempdir().unwrap();
        let (host, inside, out) = (
            dir.path().join("host"),
            dir.path().join("guest"),
            dir.path().join("out"),
        );
        let disk = |name: &str, dev| Disk {
            name: name.into(),
            under_test: true,
            guest_dev: dev,
            ..Disk::default()
        };
        make(&host, RunKind::Host, "kvm", disk("virtio-disk0", None));
        make(&inside, RunKind::Guest, "guest", disk("vda", Some(7)));
        let run = join(&host, &inside, &out).unwrap();
        assert_eq!(Run::load(&out).unwrap(), run);
        let round = &run.rounds[0];
        assert_eq!(round.traced, ["kvm", "guest"]);
        assert_eq!((round.clocks.host.len(), round.clocks.guest.len()), (1, 1));
        for stream in &round.streams {
            assert_eq!(round.open(&out, stream).unwrap().count(), 1);
        }
        let disk = run.disk().unwrap();
        assert_eq!(
            (disk.name.as_str(), disk.guest_dev),
            ("virtio-disk0", Some(7))
        );
        assert_eq!(run.problems, ["host: p", "guest: p"]);
        // The wrong way round, and twice into the same folder.
        assert!(join(&inside, &host, &dir.path().join("o2")).is_err());
        assert!(join(&host, &inside, &out).is_err());
    }
}
