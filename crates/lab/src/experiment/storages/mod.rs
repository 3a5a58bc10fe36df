//! Runs one job on several storages, on the host and in a guest. The results show the effect of a
//! file system, a network and virtualisation. The job is from a blog post about a cluster of
//! virtual machines (Richard W.M. Jones, "Cluster performance: baseline testing").

mod fio;

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::place::{Found, Place};
use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield, shared};
use crate::bed::{DISK, GuestBed, Job, Seen, image};
use crate::error::{Error, Result};
use crate::evidence;
use crate::host::Accelerator;
use crate::machine::{Aio, Machine};
use crate::scratch::Scratch;
use crate::server::{self, Spec};
use crate::words::words;
use crate::work::Worked;
use fio::{JOBS, On, SHAPE, Virt};

pub struct Storages;

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        "place",
        "Places of the disks; the first is the reference for the others",
        Kind::of::<Place>("DIRECTORY, /dev/DEVICE, nbd://HOST/EXPORT, nbd+unix:///?socket=PATH"),
        "/var/tmp",
    ),
    Parameter::new(
        "where",
        "Place where the job runs: on the host, or in a guest",
        Kind::of::<Where>(Where::FORM),
        "host,guest",
    ),
    Parameter::new(
        "disk",
        "Server of the guest's disk",
        Kind::of::<server::Kind>(server::OWN_FORM),
        "fathom",
    ),
    shared::aio("io_uring"),
    Parameter::new(
        "size",
        "Size of each of the four files to read and write",
        Kind::Size {
            least: 1 << 20,
            most: 1 << 40,
        },
        "1G",
    ),
    Parameter::new(
        "runtime",
        "Maximum time of the job [default: no limit]",
        Kind::Time {
            least: Duration::from_millis(100),
            most: Duration::from_secs(24 * 3600),
        },
        "",
    ),
    Parameter::new(
        "overwrite",
        "Allow overwriting the data on devices and NBD exports",
        Kind::Switch,
        "off",
    ),
    shared::vcpus("4"),
    Parameter::new(
        "randseed",
        "Seed of fio's random offsets, the same in all cells",
        Kind::Count {
            least: 0,
            most: u32::MAX as u64,
        },
        "1",
    )
    .rarely(),
];

impl Experiment for Storages {
    fn name(&self) -> &'static str {
        "storages"
    }

    fn about(&self) -> &'static str {
        "The same job on several storages, on the host and in a guest"
    }

    fn description(&self) -> &'static str {
        "The job is fio's `virt`, which resembles four QEMU processes with one disk each. \
         Four jobs, each with four requests of 64 KiB in flight (libaio, O_DIRECT), read \
         and write at random offsets of 1 GiB each, once over all of it.\n\n\
         A place is a directory on any file system (such as a mounted NFS), a block device, \
         or an NBD export. On the host each job has a file in the directory, or a part of \
         the device or export. In the guest each job has a part of a disk, whose image is a \
         file in that directory, or the device, or the export. All of the storage is \
         written before the job begins.\n\n\
         Sentences below the table compare each place with the first, and the guest with \
         the host, by IOPS. The sentences name emulation instead of virtualisation if this \
         machine has no hardware for it.\n\n\
         The data on a device or export is lost. Devices and exports are rejected without \
         --overwrite. A comma in a path is written as \\,."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let cell = Cell::new(settings)?;
        let found = cell.place.find()?;
        found.refuse_data(settings.is_on("overwrite"))?;
        found.check_room(cell.virt.bytes())?;
        if cell.side == Where::Host {
            return Ok(());
        }
        let refuse = |why: &str| Err(Error::Protocol(format!("--disk {}: {why}", cell.disk)));
        match (&cell.disk, &found) {
            (server::Kind::Socket(_), _) => refuse("its disk is not in the place"),
            (server::Kind::Qsd, Found::Export(_)) => {
                refuse("no NBD exports are served by it here; use fathom or qemu")
            }
            (server::Kind::Qsd, Found::Device(_)) => {
                refuse("no devices are served by it here; use fathom or qemu")
            }
            _ => cell.disk.check(&cell.spec()),
        }
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let cell = Cell::new(settings)?;
        let mut needs = vec![Need::Program("fio"), Need::FioEngine("libaio")];
        if let Place::Nbd(_) = cell.place {
            needs.push(Need::FioEngine("nbd"));
        }
        if cell.side == Where::Guest {
            needs.extend(Need::GUEST);
        }
        Ok(needs)
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const AROUND: Duration = Duration::from_secs(5);
        const BOOT: Duration = Duration::from_secs(20);
        const BYTES_PER_SECOND: u64 = 150_000_000;
        let Ok(cell) = Cell::new(settings) else {
            return AROUND;
        };
        let pass = Duration::from_secs(cell.virt.bytes() / BYTES_PER_SECOND);
        let boot = match cell.side {
            Where::Host => Duration::ZERO,
            Where::Guest => BOOT,
        };
        AROUND + boot + pass + cell.virt.runtime.unwrap_or(pass)
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Measuring {
            fathom: context.fathom.clone(),
            filled: HashSet::new(),
        })
    }
}

words! {
    /// Where the job runs: on the host or in a guest.
    pub enum Where {
        Host = "host",
        Guest = "guest",
    }
}

struct Cell {
    place: Place,
    side: Where,
    disk: server::Kind,
    aio: Aio,
    vcpus: u16,
    virt: Virt,
}

impl Cell {
    fn new(settings: &Settings) -> Result<Cell> {
        Ok(Cell {
            place: settings.word("place")?,
            side: settings.word("where")?,
            disk: settings.word("disk")?,
            aio: settings.word("aio")?,
            vcpus: Settings::needed("vcpus", settings.count("vcpus")?)?,
            virt: Virt {
                size: Settings::needed("size", settings.size("size")?)?,
                runtime: settings.time("runtime")?,
                seed: Settings::needed("randseed", settings.count("randseed")?)?,
            },
        })
    }

    /// The disk, without its image.
    fn spec(&self) -> Spec<'static> {
        Spec {
            name: DISK,
            aio: self.aio,
            queues: self.vcpus,
            ..Spec::default()
        }
    }
}

struct Measuring {
    fathom: PathBuf,
    /// Devices and exports that have been filled, by name and size in bytes.
    filled: HashSet<(String, u64)>,
}

impl Session for Measuring {
    fn cell(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let cell = Cell::new(settings)?;
        let found = cell.place.find()?;
        found.refuse_data(settings.is_on("overwrite"))?;
        self.fill(&cell, &found, progress)?;
        let seen = match cell.side {
            Where::Host => on_host(&cell, &found, progress)?,
            Where::Guest => self.in_guest(&cell, &found, folder, progress)?,
        };
        Ok(Yield {
            words: words(&cell, &found),
            ..Yield::from(seen)
        })
    }
}

impl Measuring {
    /// Fills a device or an export, once per run. Files in a directory are made for each cell.
    fn fill(&mut self, cell: &Cell, found: &Found, progress: &mut dyn FnMut(&str)) -> Result<()> {
        let name = (found.to_string(), cell.virt.bytes());
        if let Found::Directory { .. } = found {
            return Ok(());
        }
        if self.filled.contains(&name) {
            return Ok(());
        }
        progress(&format!(
            "writing {} MiB to {found}",
            cell.virt.bytes() >> 20
        ));
        cell.virt.fill(on(found), Scratch::small()?.path())?;
        self.filled.insert(name);
        Ok(())
    }

    fn in_guest(
        &self,
        cell: &Cell,
        found: &Found,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Seen> {
        // Paths of sockets must be short, and network file systems do not support sockets.
        let sockets = Scratch::small()?;
        let files;
        let image = match found {
            Found::Device(path) => path.clone(),
            Found::Export(uri) => uri.into(),
            Found::Directory { path, .. } => {
                let bytes = cell.virt.bytes();
                progress(&format!(
                    "writing an image of {} MiB to {found}",
                    bytes >> 20
                ));
                files = Scratch::within(path)?;
                let image = files.path().join("disk.img");
                image::fill(&image, bytes)?;
                image
            }
        };
        let machine = Machine {
            cpus: cell.vcpus.into(),
            ..Machine::default()
        };
        let spec = Spec {
            fathom: &self.fathom,
            dir: sockets.path(),
            image: &image,
            ..cell.spec()
        };
        let bed = GuestBed::boot(machine, &cell.disk, &spec, progress)?;
        let mut bed = bed.with_dir(sockets);
        progress("running fio in the guest");
        let seen = bed.measure(&Job {
            script: &cell.virt.script(&bed.device),
            timeout: cell.virt.timeout(),
            parse: &|text| Worked::of_fio(text, SHAPE),
        })?;
        progress("powering the guest off");
        bed.end_into(folder)?;
        Ok(seen)
    }
}

fn on_host(cell: &Cell, found: &Found, progress: &mut dyn FnMut(&str)) -> Result<Seen> {
    let (dir, below) = match found {
        Found::Directory { path, .. } => {
            progress(&format!(
                "writing {JOBS} files of {} MiB to {found}",
                cell.virt.size >> 20
            ));
            let dir = Scratch::within(path)?;
            for job in 0..JOBS {
                image::fill(&dir.path().join(fio::file(job)), cell.virt.size)?;
            }
            let first = dir.path().join(fio::file(0));
            (dir, Some(first))
        }
        Found::Device(path) => (Scratch::small()?, Some(path.clone())),
        Found::Export(_) => (Scratch::small()?, None),
    };
    progress(&format!("running fio on the host, over {found}"));
    // `None` if the device is not known, for example of a network file system.
    let device = below.and_then(|path| evidence::device_below(&path).ok().flatten());
    let job = cell.virt.on_host(on(found), dir.path())?;
    job.measure(device, &|text| Worked::of_fio(text, SHAPE))
}

/// Returns where fio reads and writes on the host.
fn on(found: &Found) -> On<'_> {
    match found {
        Found::Directory { .. } => On::Files,
        Found::Device(path) => On::Device(path),
        Found::Export(uri) => On::Export(uri),
    }
}

/// Returns the names of the cell's place and side for sentences that compare cells.
fn words(cell: &Cell, found: &Found) -> BTreeMap<String, String> {
    let mut words = BTreeMap::from([("place".to_owned(), found.to_string())]);
    if cell.side == Where::Guest {
        // The cost of an emulated guest is not that of virtualisation.
        let word = match Accelerator::detect() {
            Accelerator::Kvm => "virtualisation",
            Accelerator::Tcg => "emulation",
        };
        words.insert("where".into(), word.into());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(settings: &Settings) -> String {
        Storages.check(settings).unwrap_err().to_string()
    }

    #[test]
    fn what_does_not_go_together_is_said() {
        let settings = Settings::defaults(PARAMETERS).with("size", "1M");
        Storages.check(&settings).unwrap();
        Storages
            .check(&settings.clone().with("where", "guest"))
            .unwrap();
        let export = settings.clone().with("place", "nbd://localhost");
        assert!(refused(&export).contains("pass --overwrite"));
        let export = export.with("overwrite", "on");
        Storages.check(&export).unwrap();
        let served = export.with("where", "guest").with("disk", "qsd");
        assert!(refused(&served).contains("--disk qsd: no NBD exports"));
        let socket = settings.with("where", "guest").with("disk", "socket:/s");
        assert!(refused(&socket).contains("not in the place"));
        let huge = Settings::defaults(PARAMETERS).with("size", "1T");
        assert!(refused(&huge).contains("needs 4T"), "{}", refused(&huge));
    }

    #[test]
    fn a_cell_says_what_its_values_are_called() {
        let settings = Settings::defaults(PARAMETERS).with("where", "guest");
        let cell = Cell::new(&settings).unwrap();
        let found = Found::Export("nbd://h".into());
        let words = words(&cell, &found);
        assert_eq!(words["place"], "NBD (nbd://h)");
        let is_emulated = Accelerator::detect() == Accelerator::Tcg;
        assert_eq!(words["where"] == "emulation", is_emulated);
    }

    #[test]
    fn only_what_a_cell_uses_is_needed() {
        let settings = Settings::defaults(PARAMETERS);
        let needs = Storages.needs(&settings).unwrap();
        assert!(!needs.contains(&Need::Kernel) && !needs.contains(&Need::FioEngine("nbd")));
        let settings = settings.with("place", "nbd://h").with("where", "guest");
        let needs = Storages.needs(&settings).unwrap();
        assert!(needs.contains(&Need::Kernel) && needs.contains(&Need::FioEngine("nbd")));
    }
}
