//! Images for the runs, created by QEMU's tools and by Fathom.

use super::model::{BEFORE, Model, SECTOR, Value, ZERO, fill, identify};
use super::pages::Pages;
use super::rng::Rng;
use super::run::Start;
use super::world::World;
use crate::support::{SECRET, create_file, keys, pairs, qemu_checks, qemu_img, qemu_opens};
use fathom_formats::Format;
use fathom_formats::served::{ImageOptions, OwnBitmaps};
use fathom_testing::Tried;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// The properties of an image, by qemu-img's names.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub name: &'static str,
    pub format: &'static str,
    pub options: &'static str,
    /// Cluster size in bytes.
    pub cluster: u64,
    /// Whether the image has data, and whether that data is compressed.
    pub filled: Option<Filled>,
    pub backing: Option<Backing>,
    /// Whether the metadata cache is as small as possible.
    pub tiny_cache: bool,
    /// Whether Fathom creates the image.
    pub own: bool,
    /// Whether the image has an internal snapshot of its contents.
    pub snapshot: bool,
    /// Whether the disk is larger and all of it is used.
    pub wide: bool,
    /// Whether the image is on a device, with old data after its end.
    pub device: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    Plain,
    Compressed,
}

/// The backing image. With `chain`, it has a raw backing image of its own.
#[derive(Clone, Copy, Debug)]
pub struct Backing {
    pub format: &'static str,
    pub options: &'static str,
    pub compressed: bool,
    pub chain: bool,
    /// Size of the backing disk minus that of the disk, in sectors.
    pub longer: i64,
}

impl Backing {
    pub const RAW: Backing = Backing {
        format: "raw",
        options: "",
        compressed: false,
        chain: false,
        longer: 0,
    };
    pub const LUKS: Backing = Backing {
        format: "luks",
        options: "iter-time=10",
        ..Backing::RAW
    };
    pub const QCOW2: Backing = Backing {
        format: "qcow2",
        options: "cluster_size=4k",
        ..Backing::RAW
    };
}

/// A qcow2 image with default options.
pub const QCOW2: Case = Case {
    name: "",
    format: "qcow2",
    options: "",
    cluster: 65536,
    filled: None,
    backing: None,
    tiny_cache: false,
    own: false,
    snapshot: false,
    wide: false,
    device: false,
};

/// An image with as many tables as possible.
pub const SMALL: Case = Case {
    name: "512",
    options: "cluster_size=512",
    cluster: 512,
    ..QCOW2
};

/// An image with refcounts of one bit.
pub const NARROW: Case = Case {
    name: "512-rc1",
    options: "cluster_size=512,refcount_bits=1",
    cluster: 512,
    ..QCOW2
};

/// An image whose refcount table grows.
pub const GROWING: Case = Case {
    name: "512-growing",
    options: "cluster_size=512,refcount_bits=64",
    cluster: 512,
    wide: true,
    ..QCOW2
};

/// An image whose tables are all allocated.
pub const PREALLOCATED: Case = Case {
    name: "4k-preallocated",
    options: "cluster_size=4k,preallocation=metadata",
    cluster: 4096,
    ..QCOW2
};

/// An image with shared clusters, which must not be written in place.
pub const SNAPSHOT: Case = Case {
    name: "4k-snapshot",
    options: "cluster_size=4k",
    cluster: 4096,
    filled: Some(Filled::Plain),
    snapshot: true,
    ..QCOW2
};

/// An image with subclusters.
pub const EXTENDED: Case = Case {
    name: "16k-extended",
    options: "cluster_size=16k,extended_l2=on",
    cluster: 16384,
    ..QCOW2
};

/// An image with the largest clusters.
pub const LARGE: Case = Case {
    name: "2M",
    options: "cluster_size=2M",
    cluster: 2 << 20,
    ..QCOW2
};

/// An image with an external data file.
pub const DATA_FILE: Case = Case {
    name: "data-file",
    options: "cluster_size=4k,data_file=data.raw",
    cluster: 4096,
    ..QCOW2
};

/// A QED image.
pub const QED: Case = Case {
    name: "qed",
    format: "qed",
    options: "cluster_size=4k,table_size=2",
    cluster: 4096,
    ..QCOW2
};

/// An encrypted qcow2 image.
pub const ENCRYPTED: Case = Case {
    name: "encrypted",
    options: "cluster_size=4k,encrypt.format=luks,encrypt.iter-time=10",
    cluster: 4096,
    ..QCOW2
};

/// An encrypted raw disk. Unwritten sectors read as arbitrary bytes.
pub const LUKS: Case = Case {
    name: "luks",
    format: "luks",
    options: "iter-time=10",
    filled: Some(Filled::Plain),
    ..QCOW2
};

/// An image's files and their contents.
pub struct Made {
    pub case: Case,
    /// Names of the files; the image is the first one.
    pub names: Vec<String>,
    pub files: Vec<Pages>,
    pub initial: Vec<Value>,
    pub below: Vec<Value>,
}

/// Number of bytes of a device after the image.
const DEVICE: usize = 8 << 20;

const TOP: &str = "top.img";

impl Case {
    fn sectors(&self) -> u64 {
        let bytes = (self.cluster * 48).clamp(1 << 20, 20 << 20);
        let times = if self.wide { 8 } else { 1 };
        times * bytes / SECTOR as u64 + 3
    }

    /// The maximum size of the disk in sectors.
    pub fn room(&self) -> u64 {
        2 * self.sectors() + 5
    }

    /// Whether this resize is refused while the disk is served.
    pub fn refuses(&self, from: u64, to: u64) -> bool {
        let sectors = |backing: Backing| self.sectors().saturating_add_signed(backing.longer);
        let shows = self.backing.is_some_and(|below| sectors(below) > from) && to > from;
        let is_old = self.options.contains("compat=0.10");
        match self.format {
            "raw" | "luks" => true,
            "qed" => to < from,
            _ => is_old && shows,
        }
    }

    fn is_encrypted(&self) -> bool {
        self.format == "luks" || self.options.contains("encrypt.format")
    }

    /// QEMU's arguments for opening the image.
    pub fn opens(&self) -> Vec<String> {
        let mut opens = qemu_opens(TOP, self.format, self.is_encrypted());
        if let (Some(backing), Some(options)) = (self.backing, opens.last_mut())
            && backing.format == "luks"
        {
            options.push_str(
                ",backing.driver=luks,backing.file.filename=below.img,backing.key-secret=s",
            );
        }
        opens
    }

    pub fn format(&self) -> Format {
        Format::from_name(self.format).expect("a format")
    }

    pub fn serving(&self) -> ImageOptions {
        let mut options = ImageOptions::new(self.format());
        // The run decides when helpers' jobs are done.
        options.helpers = 0;
        options.keys = keys();
        if self.tiny_cache {
            options.metadata_cache = 0;
            // The disk reads the same, but zeroes are stored in the image itself.
            options.rebasing = true;
            options.own_bitmaps = OwnBitmaps::Kept;
        }
        options
    }

    /// Creates the image in `dir`.
    pub fn make(&self, dir: &Path, seed: u64) -> Made {
        let mut rng = Rng::new(seed ^ 0x5eed);
        let sectors = self.sectors();
        let mut names = vec![TOP.to_owned()];
        let mut below = vec![ZERO; sectors as usize];
        if let Some(backing) = &self.backing {
            below = backing.make(dir, sectors, &mut rng, &mut names);
            below.resize(sectors as usize, ZERO);
        }
        let mut initial = below.clone();
        self.make_top(dir, &mut initial, &mut rng);
        if self.snapshot {
            qemu_img(dir, &["snapshot", "-c", "before", TOP]);
        }
        if self.options.contains("data_file") {
            names.push("data.raw".into());
        }
        let files = names.iter().map(|name| Pages::load(&dir.join(name)));
        let mut files: Vec<_> = files.collect();
        if self.device {
            let end = files[0].len().next_multiple_of(self.cluster);
            let mut old = vec![0; DEVICE];
            fill(&mut old, 1 << 40, BEFORE);
            files[0].write(end, &old);
        }
        Made {
            case: *self,
            files,
            names,
            initial,
            below,
        }
    }

    fn make_top(&self, dir: &Path, initial: &mut [Value], rng: &mut Rng) {
        let size = initial.len() as u64 * SECTOR as u64;
        let base = self.backing.map(|b| (b.name(), b.format));
        if self.own {
            let mut options = pairs(self.options);
            if let Some((name, format)) = base {
                options.extend([("backing_file", name), ("backing_fmt", format)]);
            }
            return create_file(dir, TOP, self.format, &options, size);
        }
        let mut args = match self.options {
            "" => vec![],
            options => vec!["-o", options],
        };
        let size = size.to_string();
        if self.is_encrypted() {
            let base = base.map_or(vec![], |(name, format)| vec!["-b", name, "-F", format]);
            create_encrypted(dir, TOP, self.format, &args, &base, &size);
            if self.filled.is_some() {
                assert!(base.is_empty(), "what is below is not looked at");
                sprinkle(initial, BEFORE + 1, rng);
                write_raw(dir, "top.raw", initial);
                fill_encrypted(dir, "top.raw", TOP, self.format);
            }
            return;
        }
        let Some(filled) = self.filled else {
            args.splice(0..0, ["create", "-q", "-f", self.format]);
            if let Some((name, format)) = base {
                args.extend(["-b", name, "-F", format]);
            }
            args.extend([TOP, &size]);
            qemu_img(dir, &args);
            return;
        };
        sprinkle(initial, BEFORE + 1, rng);
        write_raw(dir, "top.raw", initial);
        args.splice(0..0, ["convert", "-f", "raw", "-O", self.format]);
        if filled == Filled::Compressed {
            args.push("-c");
        }
        if let Some((name, format)) = base {
            args.extend(["-B", name, "-F", format]);
        }
        args.extend(["top.raw", TOP]);
        qemu_img(dir, &args);
    }
}

impl Backing {
    fn name(&self) -> &'static str {
        "below.img"
    }

    /// Creates the backing image. Returns its contents.
    fn make(&self, dir: &Path, sectors: u64, rng: &mut Rng, names: &mut Vec<String>) -> Vec<Value> {
        let sectors = sectors.saturating_add_signed(self.longer) as usize;
        let mut holds = vec![ZERO; sectors];
        names.push(self.name().to_owned());
        if self.chain {
            sprinkle(&mut holds, BEFORE + 3, rng);
            write_raw(dir, "lowest.raw", &holds);
            names.push("lowest.raw".to_owned());
        }
        sprinkle(&mut holds, BEFORE + 2, rng);
        write_raw(dir, "below.raw", &holds);
        if self.format == "luks" {
            let size = (sectors * SECTOR).to_string();
            create_encrypted(dir, self.name(), "luks", &["-o", self.options], &[], &size);
            fill_encrypted(dir, "below.raw", self.name(), "luks");
            return holds;
        }
        let mut args = vec!["convert", "-f", "raw", "-O", self.format];
        if !self.options.is_empty() {
            args.extend(["-o", self.options]);
        }
        if self.compressed {
            args.push("-c");
        }
        if self.chain {
            args.extend(["-B", "lowest.raw", "-F", "raw"]);
        }
        args.extend(["below.raw", self.name()]);
        qemu_img(dir, &args);
        holds
    }
}

impl Made {
    pub fn world(&self, seed: u64) -> Arc<World> {
        let world = World::new(self.files.clone(), seed);
        self.prepare(&world);
        world
    }

    /// Configures a world for this case's storage.
    pub fn prepare(&self, world: &World) {
        let mut state = world.state();
        state.limit = self.case.device.then(|| self.files[0].len());
        state.device = self.case.device;
    }

    pub fn model(&self) -> Model {
        Model::new(self.initial.clone(), self.below.clone())
    }

    /// Returns the parameters of a run with `workers` workers.
    pub fn start(&self, world: &Arc<World>, workers: usize, seed: u64) -> Start<'_> {
        Start {
            world: world.clone(),
            names: &self.names,
            options: self.case.serving(),
            model: self.model(),
            cluster: self.case.cluster,
            wide: self.case.wide,
            plain: false,
            workers,
            seed,
        }
    }

    /// Writes the world's files to `dir`.
    pub fn store(&self, dir: &Path, world: &World) {
        let state = world.state();
        for (name, file) in self.names.iter().zip(&state.files) {
            file.store(&dir.join(name));
        }
    }

    /// Reads the world's files from `dir`.
    pub fn load(&self, dir: &Path, world: &World) {
        let mut state = world.state();
        for (name, file) in self.names.iter().zip(&mut state.files) {
            *file = Pages::load(&dir.join(name));
        }
    }

    /// Returns what QEMU reads from the image or from one of its snapshots.
    pub fn qemu_reads(&self, dir: &Path, snapshot: Option<&str>) -> Vec<Value> {
        let named = snapshot.map(|name| format!("snapshot.name={name}"));
        let opens = self.case.opens();
        let mut args = vec!["convert", "-O", "raw"];
        if let Some(named) = &named {
            args.extend(["-l", named]);
        }
        args.extend(opens.iter().map(String::as_str));
        args.push("read.raw");
        qemu_img(dir, &args);
        self.raw_holds(dir, "read.raw")
    }

    /// Returns what QEMU reads from the whole image, whose number of sectors may have changed.
    pub fn qemu_reads_all(&self, dir: &Path, sectors: usize) -> Vec<Value> {
        let opens = self.case.opens();
        let mut args = vec!["convert", "-O", "raw"];
        args.extend(opens.iter().map(String::as_str));
        qemu_img(dir, &[&args[..], &["read.raw"]].concat());
        assert_eq!(
            Pages::load(&dir.join("read.raw")).len(),
            (sectors * SECTOR) as u64
        );
        raw_holds(dir, "read.raw", sectors)
    }

    /// Returns the contents of a raw file.
    pub fn raw_holds(&self, dir: &Path, name: &str) -> Vec<Value> {
        raw_holds(dir, name, self.initial.len())
    }
    /// Checks that `qemu-img check` finds nothing, or only leaks if `leaks` is set.
    pub fn qemu_finds(&self, dir: &Path, leaks: bool) -> Result<(), String> {
        if !self.case.format().has_tables() {
            return Ok(());
        }
        Tried::Comparisons.count(1);
        match qemu_checks(dir, &self.case.opens()) {
            (0, _) => Ok(()),
            (3, _) if leaks => Ok(()),
            (status, json) => Err(format!("qemu-img check: {status}, {json:?}")),
        }
    }

    /// Checks that `qemu-img check` finds nothing at all.
    pub fn qemu_finds_nothing(&self, dir: &Path) {
        let found = self.qemu_finds(dir, false);
        found.unwrap_or_else(|problem| panic!("{problem}"));
    }

    /// Runs a snapshot command of qemu-img.
    pub fn snapshot(&self, dir: &Path, command: &str, name: &str) {
        let opens = self.case.opens();
        let mut args = vec!["snapshot", command, name];
        args.extend(opens.iter().map(String::as_str));
        qemu_img(dir, &args);
    }
}

/// Creates an empty encrypted image with QEMU. Deriving the key takes QEMU a second, so each kind
/// of image is created only once and then copied.
fn create_encrypted(
    dir: &Path,
    name: &str,
    format: &str,
    options: &[&str],
    base: &[&str],
    size: &str,
) {
    static MADE: Mutex<BTreeMap<Vec<String>, Vec<u8>>> = Mutex::new(BTreeMap::new());
    let key = match format {
        "luks" => "key-secret=s",
        _ => "encrypt.key-secret=s",
    };
    let args = ["create", "-q", "-f", format, "--object", SECRET, "-o", key];
    let args = [&args, options, base, &[name, size]].concat();
    let kind = args.iter().map(|arg| (*arg).to_owned()).collect();
    let mut made = MADE.lock();
    let image = made.entry(kind).or_insert_with(|| {
        qemu_img(dir, &args);
        fs::read(dir.join(name)).expect("an image")
    });
    fs::write(dir.join(name), image).expect("it is written");
}

/// Copies a raw file to an encrypted image with QEMU.
fn fill_encrypted(dir: &Path, from: &str, name: &str, format: &str) {
    let opens = qemu_opens(name, format, true);
    let [object, secret, _, opens] = &opens[..] else {
        unreachable!("see there");
    };
    let args = [
        "convert",
        "-n",
        object,
        secret,
        "-f",
        "raw",
        "--target-image-opts",
        from,
        opens,
    ];
    qemu_img(dir, &args);
}

/// Returns the contents of the first `sectors` sectors of a raw file.
pub fn raw_holds(dir: &Path, name: &str, sectors: usize) -> Vec<Value> {
    let file = Pages::load(&dir.join(name));
    let sector = |n: u64| {
        let mut bytes = [0; SECTOR];
        file.read(&mut bytes, n * SECTOR as u64);
        identify(&bytes, n).unwrap_or_else(|what| panic!("{name}: sector {n} is {what}"))
    };
    (0..sectors as u64).map(sector).collect()
}

/// Fills random ranges of the sectors with data.
fn sprinkle(holds: &mut [Value], value: Value, rng: &mut Rng) {
    let len = holds.len() as u64;
    for _ in 0..12 {
        let first = rng.below(len);
        let n = 1 + rng.below((len / 12).max(1));
        let last = (first + n).min(len);
        holds[first as usize..last as usize].fill(value);
    }
}

fn write_raw(dir: &Path, name: &str, holds: &[Value]) {
    let file = File::create(dir.join(name)).expect("a file");
    file.set_len((holds.len() * SECTOR) as u64)
        .expect("it can be as long");
    let mut sector = [0; SECTOR];
    for (n, value) in holds.iter().enumerate() {
        if *value != ZERO {
            fill(&mut sector, n as u64, *value);
            file.write_all_at(&sector, (n * SECTOR) as u64)
                .expect("it is written");
        }
    }
}
