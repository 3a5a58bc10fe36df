//! Runs perf during a cell's work, on both sides at the same time: records requests that are handed
//! to devices, and events in between.

use std::path::Path;
use std::time::Duration;

use fathom_run::{Crossing, RequestPath, Side};

use super::bed::Bed;
use super::trace::{FIELDS, Of, SCHEDULER, Trace, Watch};
use crate::error::Result;
use crate::perf::{InGuest, Modules, OnHost, Recording};
use crate::tracers::Tracefs;

const SOON: Duration = Duration::from_secs(60);
/// Event of the host's kernel that exists if KVM is loaded.
const EXITS: &str = "kvm/kvm_exit";
/// Mounts tracefs, so that perf finds the guest's events.
const MOUNT: &str = "mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null || true";
/// The guest's first process, whose descendants are all others.
const INIT: u32 = 1;

/// A crossing and its event.
type Counted = (Crossing, &'static str);
/// Crossings that are counted on both sides.
const OTHERS: [Counted; 3] = [
    (Crossing::Switches, "sched:sched_switch"),
    (Crossing::WakeUps, "sched:sched_wakeup"),
    (Crossing::Calls, "raw_syscalls:sys_enter"),
];

/// A recording in progress.
pub struct Recorder {
    of: Of,
    guest: Option<InGuest>,
    host: OnHost,
    /// Crossings that are counted on the host.
    on_host: Vec<Counted>,
    /// tracefs, which stays mounted while perf records.
    _tracefs: Tracefs,
}

impl Recorder {
    /// Starts to record; files are written to the directory `files`.
    ///
    /// # Errors
    /// If perf cannot record on one of the sides.
    pub fn start(bed: &mut Bed, of: Of, files: &Path) -> Result<Recorder> {
        let tracefs = Tracefs::open()?;
        let mut on_host = OTHERS.to_vec();
        let guest = match bed.guest() {
            Some(guest) => {
                if tracefs.has_event(EXITS) {
                    on_host.push((Crossing::Exits, "kvm:kvm_exit"));
                }
                guest.check(MOUNT, SOON)?;
                Some(InGuest::start(guest, &recording(of, &OTHERS))?)
            }
            None => None,
        };
        let host = OnHost::start(files, &recording(of, &on_host))?;
        Ok(Recorder {
            of,
            guest,
            host,
            on_host,
            _tracefs: tracefs,
        })
    }

    /// Stops both sides. No recording is printed before both have stopped, because printing is
    /// work, too.
    ///
    /// # Errors
    /// If perf does not end in time.
    pub fn stop(self, bed: &mut Bed) -> Result<Recorder> {
        let host = self.host.stop()?;
        let guest = match (self.guest, bed.guest()) {
            (Some(perf), Some(guest)) => Some(perf.stop(guest)?),
            _ => None,
        };
        Ok(Recorder {
            host,
            guest,
            ..self
        })
    }

    /// Returns the recorded path, and messages about missing data.
    ///
    /// # Errors
    /// If perf cannot read its recording.
    pub fn path(self, bed: &mut Bed) -> Result<(RequestPath, Vec<String>)> {
        let (mut path, mut missing) = (RequestPath::default(), Vec::new());
        if let Some(perf) = self.guest {
            let (numbers, name) = bed.disk_in_guest()?.unzip();
            let watch = Watch {
                of: self.of,
                carriers: vec![(INIT, "")],
                device: numbers,
                crossings: crossings(&OTHERS),
            };
            let Some(guest) = bed.guest() else {
                return Ok((path, missing));
            };
            let modules = Modules::parse(&guest.check("cat /proc/modules", SOON)?);
            let mut trace = Trace::new(watch, modules);
            missing.extend(perf.print(guest, &mut |chunk| trace.push(chunk))?);
            add(&mut path, trace, Side::Guest, &|_| name.clone());
        }
        let watch = Watch {
            of: self.of,
            carriers: bed.carriers(),
            device: None,
            crossings: crossings(&self.on_host),
        };
        let mut trace = Trace::new(watch, Modules::of_host());
        missing.extend(self.host.print(&mut |chunk| trace.push(chunk))?);
        add(&mut path, trace, Side::Host, &name_of);
        Ok((path, missing))
    }
}

/// Adds a side's devices. `name` converts a device's numbers in events to its name, if known.
fn add(path: &mut RequestPath, trace: Trace, side: Side, name: &dyn Fn(&str) -> Option<String>) {
    let (mut devices, between) = trace.finish(side);
    for one in &mut devices {
        let bare = one.device.trim_end_matches(SCHEDULER);
        if let Some(name) = name(bare) {
            one.device = format!("{name}{}", &one.device[bare.len()..]);
        }
    }
    path.devices.extend(devices);
    path.between.extend(between);
}

fn crossings(counted: &[Counted]) -> Vec<Crossing> {
    counted.iter().map(|(what, _)| *what).collect()
}

/// Returns the name of a block device of this machine, by its numbers in events (`254,0`). `None`
/// if the device has none.
fn name_of(numbers: &str) -> Option<String> {
    let link = Path::new("/sys/dev/block").join(numbers.replace(',', ":"));
    let target = std::fs::read_link(link).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

fn recording(of: Of, counted: &[Counted]) -> Recording {
    let (handed, more) = of.events();
    let bare = more.iter().chain(counted.iter().map(|(_, event)| event));
    let bare = bare.map(|event| format!("--event={event}/call-graph=no/"));
    let handed = handed.iter();
    let handed = handed.map(|event| format!("--event={event}/call-graph=fp/"));
    Recording {
        name: "path",
        words: handed.chain(bare).collect(),
        fields: FIELDS,
        with_tasks: true,
        most: ["1G", "64M"],
    }
}
