//! Effects of settings: changes one factor at a time around a base, or runs all combinations.
//!
//! Every cell has a guest of its own, because most settings take effect when the guest boots.

mod cell;
mod load;
mod parameters;
mod scheduler;
mod storage;

use std::path::{Path, PathBuf};
use std::time::Duration;

use self::cell::Cell;
use self::parameters::{PARAMETERS, Storage};
use self::storage::Stored;
use super::{Context, Design, Experiment, Need, Parameter, Session, Settings, Values, Yield};
use crate::bed::{GuestBed, Job};
use crate::error::{Error, Result};
use crate::host::Accelerator;
use crate::machine::Format;
use crate::server::Spec;
use crate::work::{AROUND_FIO, Worked};

pub struct Factors;

/// Size of a huge page of the guest's memory.
const HUGE_PAGE_MIB: u32 = 2;

impl Experiment for Factors {
    fn name(&self) -> &'static str {
        "settings"
    }

    fn about(&self) -> &'static str {
        "Effects of settings: bus, cache, aio, format, file system and more, one at a time"
    }

    fn description(&self) -> &'static str {
        "The first value of every parameter makes the base. Each other value is run alone, \
         with everything else as in the base: --cache none,writethrough --bus \
         virtio-blk,ide,nvme makes four points, not six. --full runs all combinations.\n\n\
         fio runs in the guest, on the disk or in a file of the guest's file system. The \
         same job runs on the image on the host. The report ranks the settings by their \
         effects on IOPS, on the 99th percentile of latency, and on the CPU time of a \
         request, and says which of them the rounds show. A single round shows nothing: with up \
         to six values besides the base, eight rounds are the fewest for a verdict.\n\n\
         An effect holds for this base and this load. For example, a load of one request at \
         a time does not show that IDE serves only one at a time, and a load without writes \
         does not show the cost of a cache mode. Values that do not fit the base are \
         rejected before anything runs: choose another base by writing its values first. \
         Without hardware virtualisation the guest is emulated: its figures compare only \
         with those of other emulated guests."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn design(&self, values: &Values) -> Result<Design> {
        let full: Vec<&str> = { values.get("full").into_iter().flatten() }
            .map(String::as_str)
            .collect();
        match full[..] {
            ["on"] => Ok(Design::Full),
            ["off"] => Ok(Design::OneFactor),
            _ => Err(Error::Protocol(
                "--full is on or off for a whole run".into(),
            )),
        }
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        Cell::new(settings)?.check()
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let cell = Cell::new(settings)?;
        let mut needs = [&Need::GUEST[..], &[Need::Program("fio")]].concat();
        let machine = cell.machine();
        needs.extend(cell.modules().map(Need::Module));
        needs.extend(cell.bus.modules().iter().copied().map(Need::Module));
        needs.extend(cell.fs.map(|fs| Need::Program(fs.maker())));
        if cell.format != Format::Raw && cell.image.is_none() {
            needs.push(Need::Program("qemu-img"));
        }
        if cell.storage == Storage::Loop {
            needs.extend([Need::Program("losetup"), Need::Root("a loop device")]);
        }
        if cell.host_scheduler.is_some() {
            needs.push(Need::Root("a scheduler of the host's"));
        }
        if machine.accelerator == Some(Accelerator::Kvm) {
            needs.push(Need::Kvm);
        }
        if machine.huge_pages == Some(true) {
            let pages = machine.memory_mib.div_ceil(HUGE_PAGE_MIB);
            needs.push(Need::HugePages(pages.into()));
        }
        Ok(needs)
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const AROUND: Duration = Duration::from_secs(25);
        let time = |cell: Cell| AROUND + cell.load.runtime.mul_f64(1.2);
        Cell::new(settings).map_or(AROUND, time)
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Running {
            fathom: context.fathom.clone(),
        })
    }
}

struct Running {
    fathom: PathBuf,
}

impl Session for Running {
    fn cell(
        &mut self,
        settings: &Settings,
        _folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let cell = Cell::new(settings)?;
        let load = &cell.load;
        let stored = Stored::make(&cell, progress)?;
        let spec = Spec {
            fathom: &self.fathom,
            dir: stored.dir(),
            image: &stored.path,
            ..cell.spec()
        };
        let mut bed = GuestBed::boot(cell.machine(), &cell.disk, &spec, progress)?;
        progress("preparing the disk in the guest");
        let script = cell.preparation(&bed.device);
        bed.guest.check(&script, PREPARATION)?;
        let seconds = load.runtime.as_secs_f32();
        progress(&format!("{} in the guest for {seconds} s", load.label()));
        let seen = bed.measure(&Job {
            script: &load.script(cell.target(&bed.device)),
            timeout: load.runtime + AROUND_FIO,
            parse: &|text| Worked::of_fio(text, load.shape()),
        })?;
        let mut found = Yield::from(seen);
        progress("powering the guest off");
        bed.end()?;
        if let Some(path) = &stored.bare {
            progress("the same on the host");
            found.compare(load.on_host(path)?);
        }
        Ok(found)
    }
}

/// Time limit for making a file system with a file that fills half of it.
const PREPARATION: Duration = Duration::from_secs(1800);
