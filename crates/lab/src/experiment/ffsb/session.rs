//! Runs cells. Guests are kept for later cells of their kind. In each round, the host itself is
//! measured once for each load, and for each cell of its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::evidence::{Bare, Evidence};

use super::cell::{Bench, Cell, Side};
use super::load::{Load, Place};
use crate::bed::{GuestBed, HostBed, Job, Pool, Seen};
use crate::disk_image;
use crate::error::Result;
use crate::experiment::{Session, Settings, Yield};
use crate::machine::Machine;
use crate::scratch::Scratch;
use crate::server::{self, Spec};
use crate::work::Worked;

/// Maximum number of guests at a time, because they use this machine's memory and disk space.
const MOST_GUESTS: usize = 4;
/// Time for all work that does not depend on the size of the files, also in emulated guests.
const AROUND: Duration = Duration::from_secs(600);
/// Minimum speed expected of a disk, in bytes per second.
const SLOWEST: u64 = 10 << 20;

pub struct Running {
    fathom: PathBuf,
    guests: Pool<GuestBed>,
    host: Option<HostBed>,
    round: u32,
    /// Results of the host itself in this round, by load.
    bare: BTreeMap<String, Known>,
}

/// Results of the host itself for a load.
struct Known {
    bare: Bare,
    /// Kept until the host's own cell with this load is run.
    yielded: Option<Yield>,
}

impl Running {
    pub fn new(fathom: PathBuf) -> Running {
        Running {
            fathom,
            guests: Pool::new(MOST_GUESTS),
            host: None,
            round: 0,
            bare: BTreeMap::new(),
        }
    }

    fn in_guest(
        &mut self,
        kind: &server::Kind,
        cell: &Cell,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let Cell { load, bench, .. } = cell;
        let name = format!("{kind} {bench:?}");
        let mut bed = match self.guests.take(&name) {
            Some(bed) => bed,
            None => boot(kind, bench, &self.fathom, progress)?,
        };
        let seen = work(&mut bed, bench, load, progress)?;
        self.guests.keep(name, bed);
        Ok(Yield::from(seen))
    }

    fn on_host(&mut self, load: &Load, progress: &mut dyn FnMut(&str)) -> Result<Yield> {
        let host: &HostBed = match &self.host {
            Some(host) => host,
            None => self.host.insert(HostBed::new()?),
        };
        let place = Place::on_host(&self.fathom);
        let Place { files, .. } = &place;
        progress("making files on the host itself");
        let make = format!("rm -rf {files}\nmkdir {files}\n{}", load.prepare(&place)?);
        host.check(&make, patience(load)?)?;
        progress(&format!("{} on the host itself", said(load)));
        let seen = host.measure(&Job {
            script: &load.run(&place)?,
            timeout: load.runtime + AROUND,
            parse: &|text| load.parse(text),
        })?;
        host.check(&format!("rm -rf {files}"), AROUND)?;
        Ok(bare_yield(seen))
    }

    /// Returns the host's results for a load, and measures them if necessary.
    fn bare(&mut self, load: &Load, progress: &mut dyn FnMut(&str)) -> Result<Bare> {
        let key = format!("{load:?}");
        if let Some(known) = self.bare.get(&key) {
            return Ok(known.bare.clone());
        }
        let yielded = Some(self.on_host(load, progress)?);
        let bare = yielded.as_ref().map_or_else(Bare::default, of);
        let known = Known {
            bare: bare.clone(),
            yielded,
        };
        self.bare.insert(key, known);
        Ok(bare)
    }

    /// Returns the host's own cell, which may have been measured for another cell.
    fn bare_cell(&mut self, load: &Load, progress: &mut dyn FnMut(&str)) -> Result<Yield> {
        let key = format!("{load:?}");
        let known = self.bare.get_mut(&key);
        if let Some(yielded) = known.and_then(|known| known.yielded.take()) {
            return Ok(yielded);
        }
        let yielded = self.on_host(load, progress)?;
        let known = Known {
            bare: of(&yielded),
            yielded: None,
        };
        self.bare.insert(key, known);
        Ok(yielded)
    }
}

impl Session for Running {
    fn begin_round(&mut self, round: u32) {
        if std::mem::replace(&mut self.round, round) != round {
            self.bare.clear();
        }
    }

    fn cell(
        &mut self,
        settings: &Settings,
        _folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let cell = Cell::new(settings)?;
        match &cell.side {
            Side::Bare => self.bare_cell(&cell.load, progress),
            Side::Guest(kind) => {
                let mut yielded = self.in_guest(kind, &cell, progress)?;
                yielded.compare(self.bare(&cell.load, progress)?);
                Ok(yielded)
            }
        }
    }
}

/// Boots a guest with an empty disk.
fn boot(
    kind: &server::Kind,
    bench: &Bench,
    fathom: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<GuestBed> {
    let dir = Scratch::on_disk()?;
    let image = dir.path().join("disk.img");
    disk_image::sparse(&image, bench.size)?;
    let machine = Machine {
        cpus: bench.vcpus,
        modules: bench.fs.module().map(String::from).into_iter().collect(),
        programs: vec![fathom.to_owned()],
        ..Machine::default()
    };
    let spec = Spec {
        fathom,
        dir: dir.path(),
        image: &image,
        ..bench.spec()
    };
    let bed = GuestBed::boot(machine, kind, &spec, progress)?;
    Ok(bed.with_dir(dir))
}

/// Runs a load in a guest, on a new file system as in every other cell.
fn work(
    bed: &mut GuestBed,
    bench: &Bench,
    load: &Load,
    progress: &mut dyn FnMut(&str),
) -> Result<Seen> {
    let place = Place::in_guest();
    progress("making files in the guest");
    let mount = bench.mount(&bed.device, &place.files);
    let make = format!("{mount}{}", load.prepare(&place)?);
    bed.guest.check(&make, patience(load)?)?;
    progress(&format!("{} in the guest", said(load)));
    let seen = bed.measure(&Job {
        script: &load.run(&place)?,
        timeout: load.runtime + AROUND,
        parse: &|text| load.parse(text),
    })?;
    // A guest that waits for its next cell must not write.
    let unmount = format!("umount {}", place.files);
    bed.guest.check(&unmount, AROUND)?;
    Ok(seen)
}

fn said(load: &Load) -> String {
    let Load {
        scenario, threads, ..
    } = load;
    format!(
        "{scenario}, {threads} at once, for {:.0} s",
        load.runtime.as_secs_f64()
    )
}

/// Returns the time limit for creating the files.
fn patience(load: &Load) -> Result<Duration> {
    Ok(AROUND + Duration::from_secs(load.bytes()? / SLOWEST))
}

/// The talk shows the CPUs of its bare machine in the columns of the guests' CPUs, so the measures
/// do as well. The evidence has the CPUs as the host's.
fn bare_yield(seen: Seen) -> Yield {
    let as_guest = Evidence {
        guest: seen.evidence.host.clone(),
        ..seen.evidence.clone()
    };
    let mut yielded = Yield::from(Seen {
        evidence: as_guest,
        ..seen
    });
    yielded.evidence = Some(seen.evidence);
    yielded
}

/// Returns the results with which other cells are compared.
fn of(yielded: &Yield) -> Bare {
    let evidence = yielded.evidence.as_ref();
    let load = evidence.map(|evidence| evidence.load.clone());
    let measures = Vec::new();
    let load = load.unwrap_or_default();
    Worked { measures, load }.bare()
}
