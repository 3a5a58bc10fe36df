//! Joins several runs that were recorded at the same time into one run directory. A host's run is
//! joined with the run of its guest, of the host that serves its requests, or of both.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use fathom_run::{Clock, Clocks, Environment, Round, Run, RunKind, StreamInfo};

use super::window::refuse_to_overwrite;
use crate::error::{Context, Error, Result};
use crate::tracers::{fathom, guest, kvm};

const JOINED: &str = "joined";
/// Name of the remote server's events, and of their collector in a round's list.
const REMOTE: &str = "remote";

/// A run and its directory.
struct Part<'a> {
    dir: &'a Path,
    run: Run,
}

/// Creates a run directory from a host's run and others. The others' events are added to the host's
/// round that traced requests. The report checks whether the runs overlap in time.
///
/// # Errors
/// When one of the runs has the wrong kind, or the new one cannot be written.
pub fn join(host: &Path, others: &[&Path], output: &Path) -> Result<Run> {
    let host = load(host)?;
    if host.run.kind != RunKind::Host {
        return Err(unfit(
            host.dir,
            "not the run of a host (fathom breakdown --pid or --server); name that run first",
        ));
    }
    let (mut guest, mut remote) = (None, None);
    for dir in others {
        let other = load(dir)?;
        let place = match other.run.kind {
            RunKind::Guest => &mut guest,
            RunKind::Host
                if other
                    .run
                    .rounds
                    .iter()
                    .any(|round| has(round, fathom::NAME)) =>
            {
                &mut remote
            }
            _ => {
                return Err(unfit(
                    dir,
                    "neither the run of a guest (fathom guest record) nor that of a server that receives \
                     the requests (fathom breakdown --server, on its host)",
                ));
            }
        };
        if place.is_some() {
            return Err(unfit(dir, "a second run of the same kind"));
        }
        *place = Some(other);
    }
    refuse_to_overwrite(output)?;
    let best = best_round(&host.run);
    let mut rounds = Vec::new();
    for (index, round) in host.run.rounds.iter().enumerate() {
        let mut joined = round.clone();
        if Some(index) == best {
            joined.name = JOINED.into();
        }
        let folder = output.join(&joined.name);
        fs::create_dir_all(&folder).context(|| format!("cannot create {}", folder.display()))?;
        for stream in &round.streams {
            copy(host.dir, round, stream, &folder.join(stream.file_name()))?;
        }
        if Some(index) == best {
            add_guest(&mut joined, guest.as_ref(), &folder)?;
            add_remote(&mut joined, remote.as_ref(), &folder)?;
        }
        rounds.push(joined);
    }
    let run = run_of(
        &host.run,
        guest.map(|part| part.run),
        remote.map(|part| part.run),
        rounds,
    );
    run.save(output)?;
    Ok(run)
}

fn run_of(host: &Run, guest: Option<Run>, remote: Option<Run>, rounds: Vec<Round>) -> Run {
    let machine =
        |run: &Option<Run>, of: fn(&Run) -> Option<fathom_run::Machine>| run.as_ref().and_then(of);
    let scenario = guest.as_ref().and_then(|guest| guest.scenario.clone());
    Run {
        created: host.created,
        scenario: scenario.or(host.scenario.clone()),
        environment: Environment {
            guest: machine(&guest, |run| run.environment.guest.clone()),
            remote: machine(&remote, |run| Some(run.environment.host.clone())),
            ..host.environment.clone()
        },
        disks: disks(host, guest.as_ref()),
        threads: host.threads.clone(),
        rounds,
        problems: problems(host, guest.as_ref(), remote.as_ref()),
        ..Run::new(RunKind::Joined, host.title.clone())
    }
}

fn load(dir: &Path) -> Result<Part<'_>> {
    let run = Run::load(dir)?;
    match run.rounds.is_empty() {
        true => Err(unfit(dir, "the run has no records")),
        false => Ok(Part { dir, run }),
    }
}

fn unfit(dir: &Path, reason: &str) -> Error {
    Error::Unusable {
        path: dir.to_owned(),
        reason: reason.into(),
    }
}

fn has(round: &Round, name: &str) -> bool {
    round.traced.iter().any(|one| one == name)
}

/// Returns the index of the host's round to which the others' events belong.
fn best_round(host: &Run) -> Option<usize> {
    let watched = |name| host.rounds.iter().position(|round| has(round, name));
    let any = || (!host.rounds.is_empty()).then_some(0);
    watched(kvm::NAME)
        .or_else(|| watched(fathom::NAME))
        .or_else(any)
}

/// Copies an event file of the run in `dir`.
fn copy(dir: &Path, round: &Round, stream: &StreamInfo, to: &Path) -> Result<()> {
    let mut from = round.file(dir, stream)?;
    // Fails if the file exists, because two event files of one name would overwrite each other.
    let copied = File::create_new(to).and_then(|mut to| io::copy(&mut from, &mut to));
    copied.context(|| format!("cannot write {}", to.display()))?;
    Ok(())
}

fn add_guest(round: &mut Round, guest: Option<&Part>, folder: &Path) -> Result<()> {
    let Some(Part { dir, run }) = guest else {
        return Ok(());
    };
    let inside = run.rounds.iter().find(|round| has(round, guest::NAME));
    let Some(inside) = inside.or(run.rounds.first()) else {
        return Ok(());
    };
    for stream in &inside.streams {
        copy(dir, inside, stream, &folder.join(stream.file_name()))?;
    }
    round.traced.extend(inside.traced.iter().cloned());
    round.benchmark = inside.benchmark.clone();
    round.streams.extend(inside.streams.iter().cloned());
    round.clocks = Clocks {
        guest: inside.clocks.guest.clone(),
        ..round.clocks.clone()
    };
    Ok(())
}

/// Adds only the server's records of the remote host: they identify the request to which each
/// belongs.
fn add_remote(round: &mut Round, remote: Option<&Part>, folder: &Path) -> Result<()> {
    let Some(Part { dir, run }) = remote else {
        return Ok(());
    };
    let mut all = run
        .rounds
        .iter()
        .flat_map(|round| round.streams.iter().map(move |stream| (round, stream)));
    let Some((there, stream)) = all.find(|(_, stream)| stream.name == fathom::NAME) else {
        return Ok(());
    };
    let renamed = StreamInfo {
        name: REMOTE.into(),
        clock: match stream.clock {
            Clock::HostTsc => Clock::RemoteTsc,
            _ => Clock::RemoteMonotonic,
        },
        ..stream.clone()
    };
    copy(dir, there, stream, &folder.join(renamed.file_name()))?;
    round.traced.push(REMOTE.into());
    round.streams.push(renamed);
    round.clocks.remote = there.clocks.host.clone();
    Ok(())
}

/// Returns the host's disks. The disk under test also gets the guest's data about it.
fn disks(host: &Run, guest: Option<&Run>) -> Vec<fathom_run::Disk> {
    let mut disks = host.disks.clone();
    let Some(inside) = guest.and_then(Run::disk) else {
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

fn problems(host: &Run, guest: Option<&Run>, remote: Option<&Run>) -> Vec<String> {
    let sides = [("host", Some(host)), ("guest", guest), ("remote", remote)];
    let sides = sides
        .into_iter()
        .filter_map(|(side, run)| Some((side, run?)));
    let lines = sides.flat_map(|(side, run)| {
        let lines = run.problems.iter();
        lines.map(move |line| format!("{side}: {line}"))
    });
    let mut problems: Vec<String> = lines.collect();
    if guest.is_some_and(|guest| guest.disk().is_none()) {
        problems.push("guest: its run names no disk, so that its requests cannot be joined".into());
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_run::{Disk, Event, Kind, Pair, StreamWriter, VERSION};

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
        let run = join(&host, &[&inside], &out).unwrap();
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
        // The wrong order of runs, and a second join into the same folder.
        assert!(join(&inside, &[&host], &dir.path().join("o2")).is_err());
        assert!(join(&host, &[&inside], &out).is_err());
    }
}
