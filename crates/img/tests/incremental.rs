//! Tests of incremental backups of a disk that QEMU has written to and whose dirty bitmap
//! `qemu-nbd` exports.

use fathom_img::{
    Backing, CreateOptions, Error, Event, Format, IncrementalOptions, Progress, incremental,
};
use fathom_storage::{Cache, EngineKind};
use fathom_testing::until;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Granularity of the bitmap: number of bytes of the disk per bit.
const GRANULARITY: u64 = 64 * KIB;

/// Size of the disk in bytes; not a multiple of the cluster size.
const SIZE: u64 = 20 * MIB + 3 * 512;

fn done(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    let output = output.unwrap_or_else(|error| panic!("{program}, of `make setup`: {error}"));
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn qemu_img(line: &str) -> String {
    done("qemu-img", &line.split(' ').collect::<Vec<_>>())
}

/// A QEMU NBD server that is killed when the test ends.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A disk with a bitmap `b`, and a full copy of the disk as it was when the bitmap was created.
struct Place {
    dir: TempDir,
    size: u64,
    random: u64,
}

impl Place {
    fn new(seed: u64) -> Place {
        let mut place = Place {
            dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
            size: SIZE,
            random: seed,
        };
        let (disk, base) = (place.path("disk"), place.path("base"));
        qemu_img(&format!("create -q -f qcow2 {disk} {SIZE}"));
        // Missing zeroes are detected only where the disk had data before.
        place.io(&["write -P 7 0 15M".into()]);
        place.change(12, 0..SIZE);
        qemu_img(&format!("convert -f qcow2 -O qcow2 {disk} {base}"));
        qemu_img(&format!("bitmap --add -g {GRANULARITY} {disk} b"));
        place
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    fn names(&self) -> BTreeSet<String> {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| !name.starts_with("server")).collect()
    }

    fn io(&self, commands: &[String]) {
        let disk = self.path("disk");
        let mut args = vec!["-f", "qcow2", "-d", "unmap"];
        commands.iter().for_each(|it| args.extend(["-c", it]));
        done("qemu-io", &[&args[..], &[&disk]].concat());
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    /// Writes, zeroes and discards `count` random parts of a range, and returns these parts.
    fn change(&mut self, count: usize, of: Range<u64>) -> Vec<Range<u64>> {
        let mut changed = Vec::new();
        let mut commands = Vec::new();
        for nth in 0..count {
            let start = of.start + self.below((of.end - of.start) / 512) * 512;
            let len = 512 * (1 + self.below(400));
            let len = len.min(of.end - start);
            commands.push(match nth % 4 {
                0 => format!("write -z {start} {len}"),
                1 => format!("discard {start} {len}"),
                _ => format!("write -P {} {start} {len}", 1 + self.below(255)),
            });
            changed.push(start..start + len);
        }
        self.io(&commands);
        changed
    }

    /// Starts a server that exports the disk with this bitmap, and returns its URI. The server
    /// accepts one client.
    fn serve(&self, bitmap: Option<&str>) -> (Server, String) {
        let (socket, pid) = (self.path("server.socket"), self.path("server.pid"));
        let _ = fs::remove_file(&pid);
        let mut server = Command::new("qemu-nbd");
        server.args(["-r", "-f", "qcow2", "-k", &socket, "--pid-file", &pid]);
        server.args(bitmap.iter().flat_map(|name| ["-B", name]));
        server.arg(self.path("disk")).stdin(Stdio::null());
        let server = Server(server.spawn().expect("qemu-nbd, of `make setup`"));
        // qemu-nbd writes its PID file when it accepts connections.
        until("the server's PID file", || Path::new(&pid).exists());
        (server, format!("nbd+unix:///?socket={socket}"))
    }

    fn backup(&self, options: &IncrementalOptions) -> Result<(u64, u64), Error> {
        let (_server, uri) = self.serve(Some("b"));
        self.backup_of(&uri, "b", options)
    }

    /// Creates the backup `new`, and returns the last progress: bytes done, and total bytes.
    fn backup_of(
        &self,
        uri: &str,
        bitmap: &str,
        options: &IncrementalOptions,
    ) -> Result<(u64, u64), Error> {
        let mut last = (0, 0);
        let mut watch = |event| match event {
            Event::Progress { done, total } => {
                assert!(done <= total, "{done} of {total}");
                last = (done, total);
            }
            Event::Warning(line) => panic!("{line}"),
        };
        let stop = AtomicBool::new(false);
        let mut progress = Progress::new(&mut watch, &stop);
        let target = self.path("new");
        let (uri, target) = (OsStr::new(uri), OsStr::new(&target));
        incremental(uri, bitmap, target, options, &mut progress)?;
        Ok(last)
    }

    /// Checks that `new` is consistent, reads as the disk does, and contains exactly the changed
    /// clusters.
    fn check(&self, changed: &[Range<u64>], cluster: u64) {
        let (new, disk) = (self.path("new"), self.path("disk"));
        qemu_img(&format!("check -q -f qcow2 {new}"));
        qemu_img(&format!("compare -q -f qcow2 -F qcow2 {new} {disk}"));
        assert_eq!(size_of(&new), self.size);
        let own = own_parts(&new);
        let own: BTreeSet<_> = own.iter().flat_map(|it| clusters(it, cluster)).collect();
        let marked = self.marked(changed, cluster);
        let too_many: Vec<_> = own.difference(&marked).collect();
        assert!(too_many.is_empty(), "{too_many:?}");
        // A backup may omit zeroes where the base is known to read as zeroes.
        let base = data_parts(&self.path("base"));
        let base: BTreeSet<_> = base.iter().flat_map(|it| clusters(it, cluster)).collect();
        let hides = |number: &&u64| base.contains(number);
        let too_few: Vec<_> = marked.difference(&own).filter(hides).collect();
        assert!(too_few.is_empty(), "{too_few:?}");
    }

    /// Returns the numbers of the clusters that the bitmap marks.
    fn marked(&self, changed: &[Range<u64>], cluster: u64) -> BTreeSet<u64> {
        let bits = changed.iter().flat_map(|part| clusters(part, GRANULARITY));
        let parts = bits.map(|bit| {
            let start = bit * GRANULARITY;
            start..(start + GRANULARITY).min(self.size)
        });
        parts.flat_map(|part| clusters(&part, cluster)).collect()
    }

    /// Returns the total size in bytes of the marked clusters.
    fn bytes_of(&self, changed: &[Range<u64>], cluster: u64) -> u64 {
        let marked = self.marked(changed, cluster);
        let len = |number: &u64| cluster.min(self.size - number * cluster);
        marked.iter().map(len).sum()
    }
}

fn clusters(part: &Range<u64>, cluster: u64) -> Range<u64> {
    part.start / cluster..part.end.div_ceil(cluster)
}

fn map_of(image: &str) -> Vec<serde_json::Value> {
    let map = qemu_img(&format!("map --output=json -f qcow2 {image}"));
    serde_json::from_str(&map).unwrap()
}

fn size_of(image: &str) -> u64 {
    let info = qemu_img(&format!("info --output=json -f qcow2 {image}"));
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    info["virtual-size"].as_u64().unwrap()
}

/// Returns the parts that are allocated in the image itself.
fn own_parts(image: &str) -> Vec<Range<u64>> {
    // Unallocated parts beyond the end of the backing file are also reported with depth 0.
    parts(image, |part| part["depth"] == 0 && part["present"] == true)
}

/// Returns the parts that are not known to read as zeroes.
fn data_parts(image: &str) -> Vec<Range<u64>> {
    parts(image, |part| part["zero"] == false)
}

fn parts(image: &str, of: impl Fn(&serde_json::Value) -> bool) -> Vec<Range<u64>> {
    let map = map_of(image);
    let some = map.iter().filter(|part| of(part)).map(|part| {
        let start = part["start"].as_u64().unwrap();
        start..start + part["length"].as_u64().unwrap()
    });
    some.collect()
}

fn options(cluster_size: u64) -> IncrementalOptions {
    let mut create = CreateOptions::new(Format::Qcow2);
    create.cluster_size = cluster_size;
    IncrementalOptions {
        keys: fathom_stack::KeyRing::default(),
        backing: Backing {
            name: "base".into(),
            format: Some(Format::Qcow2),
        },
        create,
        cache: Cache::Writeback,
        engine: EngineKind::IoUring,
        compress: false,
        rate: None,
        parallel: 16,
        allow_dirs: Vec::new(),
    }
}

#[test]
fn what_has_changed_is_kept_and_nothing_else() {
    for seed in [0x9e37_79b9_7f4a_7c15, 0x2545_f491_4f6c_dd1d] {
        let mut place = Place::new(seed);
        // Include the last sector of the disk.
        place.io(&[format!("write -P 3 {} 512", SIZE - 512)]);
        let mut changed = place.change(16, 0..SIZE);
        changed.push(SIZE - 512..SIZE);
        for cluster in [4 * KIB, 64 * KIB, 2 * MIB] {
            for compress in [false, true] {
                let options = IncrementalOptions {
                    compress,
                    ..options(cluster)
                };
                let told = place.backup(&options).unwrap();
                let bytes = place.bytes_of(&changed, cluster);
                assert_eq!(told, (bytes, bytes), "{cluster}, {compress}");
                place.check(&changed, cluster);
                let is_compressed = |part: &serde_json::Value| part["compressed"] == true;
                let map = map_of(&place.path("new"));
                assert_eq!(map.iter().any(is_compressed), compress, "{map:?}");
                fs::remove_file(place.path("new")).unwrap();
            }
        }
    }
}

/// Zeroes occupy no data clusters in the backup, but are recorded in it.
#[test]
fn what_has_become_zeroes_is_kept_as_zeroes() {
    let place = Place::new(5);
    let commands = ["write -z 1M 1M", "discard 4M 1M", "write -P 0 8M 1M"];
    place.io(&commands.map(String::from));
    let changed = [MIB..2 * MIB, 4 * MIB..5 * MIB, 8 * MIB..9 * MIB];
    place.backup(&options(64 * KIB)).unwrap();
    place.check(&changed, 64 * KIB);
    let map = map_of(&place.path("new"));
    let own = map.iter().filter(|part| part["depth"] == 0);
    own.for_each(|part| assert!(part["data"] == false && part["zero"] == true, "{part}"));
}

#[test]
fn an_unchanged_disk_is_an_empty_backup() {
    let place = Place::new(6);
    assert_eq!(place.backup(&options(64 * KIB)).unwrap(), (0, 0));
    place.check(&[], 64 * KIB);
}

#[test]
fn a_disk_may_have_grown() {
    let mut place = Place::new(7);
    let mut changed = place.change(4, 0..SIZE);
    // A block status request covers less than this size.
    place.size = (3 << 30) + 512;
    qemu_img(&format!(
        "resize -q -f qcow2 {} {}",
        place.path("disk"),
        place.size
    ));
    let end = place.size - 512..place.size;
    for part in [SIZE..30 * MIB, SIZE..place.size, end] {
        changed.extend(place.change(4, part));
    }
    for cluster in [4 * KIB, 64 * KIB, 2 * MIB] {
        place.backup(&options(cluster)).unwrap();
        place.check(&changed, cluster);
        fs::remove_file(place.path("new")).unwrap();
    }
}

#[test]
fn a_server_without_the_bitmap_is_told_of() {
    let place = Place::new(8);
    let before = place.names();
    for served in [None, Some("b")] {
        let (_server, uri) = place.serve(served);
        let made = place.backup_of(&uri, "other", &options(64 * KIB));
        assert_eq!(
            made.unwrap_err().to_string(),
            format!("{uri}: the server has no dirty bitmap 'other' of export ''")
        );
        assert_eq!(place.names(), before);
    }
}

/// How a backup ends early.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// The user cancels the backup.
    Stopped,
    /// The server exits, either after some data was read or before it has reported block status.
    Reading,
    Asking,
}

#[test]
fn a_backup_that_ends_early_leaves_nothing() {
    let mut place = Place::new(9);
    place.change(20, 0..SIZE);
    let before = place.names();
    for end in [End::Stopped, End::Reading, End::Asking] {
        let (server, uri) = place.serve(Some("b"));
        let options = IncrementalOptions {
            rate: Some(MIB),
            parallel: 1,
            ..options(64 * KIB)
        };
        let (stop, mut server) = (AtomicBool::new(false), Some(server));
        let mut watch = |event| match event {
            Event::Progress { done: 0, .. } if end != End::Asking => {}
            Event::Warning(_) => {}
            _ if end == End::Stopped => stop.store(true, Ordering::Relaxed),
            _ => drop(server.take()),
        };
        let mut progress = Progress::new(&mut watch, &stop);
        let target = place.path("new");
        let (uri, target) = (OsStr::new(&uri), OsStr::new(&target));
        let made = incremental(uri, "b", target, &options, &mut progress);
        match (end, made.unwrap_err()) {
            (End::Stopped, Error::Interrupted)
            | (End::Reading, Error::Data { what: "read", .. })
            | (End::Asking, Error::Data { what: "map", .. }) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(place.names(), before);
    }
}

#[test]
fn what_is_no_backup_is_refused() {
    let mut place = Place::new(10);
    place.change(4, 0..SIZE);
    let refused = |options: &IncrementalOptions, why: &str| {
        let before = place.names();
        let error = place.backup(options).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(place.names(), before);
    };
    for (name, value) in [("preallocation", "metadata"), ("data_file", "data")] {
        let mut other = options(64 * KIB);
        let set = other.create.set(name, value, |_| unreachable!("no size"));
        set.unwrap();
        refused(&other, &format!("omit {name}"));
    }
    let raw = IncrementalOptions {
        create: CreateOptions::new(Format::Raw),
        ..options(64 * KIB)
    };
    refused(&raw, "must be a qcow2 image");
    let mut away = options(64 * KIB);
    away.backing.name = "away".into();
    refused(&away, "away");
    // An existing image, which may be an older backup, is not overwritten.
    fs::copy(place.path("base"), place.path("new")).unwrap();
    let before = fs::read(place.path("new")).unwrap();
    refused(&options(64 * KIB), "already exists");
    assert!(fs::read(place.path("new")).unwrap() == before);
}
