//! perf around a cell's work: requests that are handed to devices, and what happens in between, on
//! both sides at once.

use std::path::Path;
use std::time::Duration;

use fathom_run::{Crossing, RequestPath, Side};

use super::bed::Bed;
use super::trace::{FIELDS, Of, SCHEDULER, Trace, Watch};
use crate::error::Result;
use crate::perf::{InGuest, Modules, OnHost, Recording};
use crate::tracers::Tracefs;

const SOON: Duration = Duration::from_secs(60);
/// Of the host's kernel, once it has KVM.
const EXITS: &str = "kvm/kvm_exit";
/// So that perf finds the guest's events.
const MOUNT: &str = "mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null || true";
/// The guest's first process, which all others are below.
const INIT: u32 = 1;

/// With the event that tells of it.
type Counted = (Crossing, &'static str);
/// What is counted on both sides.
const OTHERS: [Counted; 3] = [
    (Crossing::Switches, "sched:sched_switch"),
    (Crossing::WakeUps, "sched:sched_wakeup"),
    (Crossing::Calls, "raw_syscalls:sys_enter"),
];

/// What is being recorded.
pub struct Recorder {
    of: Of,
    guest: Option<InGuest>,
    host: OnHost,
    /// What is counted there.
    on_host: Vec<Counted>,
    /// Mounted for as long as perf records.
    _tracefs: Tracefs,
}

impl Recorder {
    /// Begins to record; files go to a directory.
    ///
    /// # Errors
    /// When perf does not record, on either side.
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

    /// Ends, on both sides before anything is printed: that is work, too.
    ///
    /// # Errors
    /// When perf does not end in time.
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

    /// What was recorded, and lines about what is missing of it.
    ///
    /// # Errors
    /// When perf cannot read what it has recorded.
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

/// `name` says what a device of the side is called, where its events have numbers.
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

/// A block device of this machine, by its numbers as events have them (`254,0`): its name, where
/// there is one.
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
