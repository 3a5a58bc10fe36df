//! Surveys a round's streams: reads them once before the join.

use std::collections::HashMap;
use std::path::Path;

use fathom_run::{Disk, Kind, Round, Run};

use super::merge::Side;

/// Facts about a round's streams, as shown by the events themselves.
#[derive(Clone, Debug, Default)]
pub(crate) struct Survey {
    guest: Vec<bool>,
    host: Vec<bool>,
    remote: Vec<bool>,
    /// The guest's block device, and whether the survey guessed it from several candidates.
    pub(crate) guest_dev: Option<u64>,
    pub(crate) guest_dev_guessed: bool,
    /// KVM changed the TSC offset of a vCPU.
    pub(crate) offset_written: bool,
    /// Number of dropped events, by stream.
    pub(crate) lost: Vec<(String, u64)>,
    /// (clock, first, last) of each stream; times are in ticks of the clock.
    pub(crate) ends: Vec<(fathom_run::Clock, u64, u64)>,
    /// Problems with the streams, such as fewer events than `run.json` says.
    pub(crate) problems: Vec<String>,
}

impl Survey {
    /// Reads a round's streams. The survey does not report damage in them: the join does.
    pub(crate) fn of(dir: &Path, run: &Run, round: &Round) -> Survey {
        let mut survey = Survey {
            guest: vec![false; Kind::ALL.len()],
            host: vec![false; Kind::ALL.len()],
            remote: vec![false; Kind::ALL.len()],
            ..Survey::default()
        };
        let mut devs: HashMap<u64, u64> = HashMap::new();
        for info in &round.streams {
            let mut stream = match round.open(dir, info) {
                Ok(stream) => stream,
                Err(error) => {
                    survey.problems.push(error.to_string());
                    continue;
                }
            };
            let side = Side::of(info.clock);
            let (mut count, mut lost, mut ends) = (0u64, 0u64, None);
            while let Ok(Some(event)) = stream.next_event() {
                count += 1;
                ends = Some((ends.map_or(event.time, |(first, _)| first), event.time));
                let kinds = match side {
                    Side::Guest => &mut survey.guest,
                    Side::Host => &mut survey.host,
                    Side::Remote => &mut survey.remote,
                };
                kinds[event.kind as usize] = true;
                match event.kind {
                    Kind::Lost => lost += event.args[0].max(1),
                    Kind::BlockRqIssue if side == Side::Guest => {
                        *devs.entry(event.args[0]).or_default() += 1;
                    }
                    Kind::KvmWriteTscOffset if event.args[1] != event.args[2] => {
                        survey.offset_written = true;
                    }
                    _ => {}
                }
            }
            survey.note_stream(info, count, lost, stream.unknown());
            if let Some((first, last)) = ends {
                survey.ends.push((info.clock, first, last));
            }
        }
        survey.find_guest_dev(run.disk(), &devs);
        survey
    }

    fn note_stream(
        &mut self,
        info: &fathom_run::StreamInfo,
        count: u64,
        mut lost: u64,
        unknown: u64,
    ) {
        let name = &info.name;
        if count + unknown < info.events {
            self.problems.push(format!(
                "{name}: {} of its {} events are missing from its file",
                info.events - count - unknown,
                info.events
            ));
        }
        if unknown > 0 {
            self.problems.push(format!(
                "{name}: {unknown} events are of kinds that this fathom does not know"
            ));
        }
        lost = lost.max(info.lost.unwrap_or(0));
        if lost > 0 {
            self.lost.push((name.clone(), lost));
        }
    }

    fn find_guest_dev(&mut self, disk: Option<&Disk>, devs: &HashMap<u64, u64>) {
        self.guest_dev = disk.and_then(|disk| disk.guest_dev);
        if self.guest_dev.is_none() {
            let most = devs.iter().max_by_key(|&(&dev, &count)| (count, dev));
            self.guest_dev = most.map(|(&dev, _)| dev);
            self.guest_dev_guessed = devs.len() > 1;
        }
    }

    /// Returns whether the guest's streams hold events of this kind.
    pub(crate) fn guest(&self, kind: Kind) -> bool {
        self.guest[kind as usize]
    }

    /// Returns whether the host's streams hold events of this kind.
    pub(crate) fn host(&self, kind: Kind) -> bool {
        self.host[kind as usize]
    }

    /// Returns whether there are any events of this side.
    pub(crate) fn any(&self, side: Side) -> bool {
        match side {
            Side::Guest => self.guest.contains(&true),
            Side::Host => self.host.contains(&true),
            Side::Remote => self.remote.contains(&true),
        }
    }

    /// Returns whether this side's events show requests to the disk.
    pub(crate) fn tells_of_requests(&self, side: Side) -> bool {
        match side {
            Side::Guest => [
                Kind::BenchOperation,
                Kind::BlockBioQueue,
                Kind::BlockRqIssue,
            ]
            .into_iter()
            .any(|kind| self.guest(kind)),
            Side::Host => {
                self.doorbells()
                    || [Kind::FathomRequest, Kind::BlockRqIssue, Kind::EventfdSignal]
                        .into_iter()
                        .any(|kind| self.host(kind))
            }
            Side::Remote => self.remote[Kind::FathomRequest as usize],
        }
    }

    /// Returns whether the round can be joined, or used for the wiki's means.
    pub(crate) fn is_useful(&self) -> bool {
        self.tells_of_requests(Side::Guest) || self.tells_of_requests(Side::Host)
    }

    /// Returns how many points on a request's way were watched. Only the rounds with the highest
    /// number are joined.
    pub(crate) fn depth(&self) -> usize {
        let guest = [
            Kind::BenchOperation,
            Kind::BlockBioQueue,
            Kind::BlockRqIssue,
            Kind::BlockRqComplete,
            Kind::VpNotify,
            Kind::VringInterrupt,
        ];
        let host = [
            Kind::FathomRequest,
            Kind::BlockRqIssue,
            Kind::KvmExit,
            Kind::KvmEntry,
            Kind::KvmMsiSetIrq,
        ];
        let guest = guest.into_iter().filter(|&kind| self.guest(kind)).count();
        let host = host.into_iter().filter(|&kind| self.host(kind)).count();
        guest + host + usize::from(self.doorbells())
    }

    /// Returns whether KVM's events show doorbells.
    pub(crate) fn doorbells(&self) -> bool {
        [Kind::KvmMmio, Kind::KvmFastMmio, Kind::KvmPio]
            .into_iter()
            .any(|kind| self.host(kind))
    }
}
