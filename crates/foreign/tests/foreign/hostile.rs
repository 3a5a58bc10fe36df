//! Images of which parts were overwritten or cut off.

use crate::support::{Dir, MADE_BY_QEMU, Rng, disk, read, sum_vhdx};
use fathom_foreign::testing::{image, walk};
use fathom_foreign::{Bytes, Image, Kind, Start};
use proptest::prelude::*;

/// A valid image with its files, and the locations of its headers and tables.
struct Good {
    kind: Kind,
    files: Vec<Vec<u8>>,
    /// Location of each table: file number, offset and size in bytes.
    tables: Vec<(usize, usize, usize)>,
}

impl Good {
    fn new(dir: &Dir, kind: Kind, options: &str) -> Good {
        dir.convert(kind, options, "image");
        let main = dir.read("image");
        let start = Start::read(kind, &main).expect(options);
        let parts = start.names().iter().map(|name| dir.read(name));
        let files: Vec<_> = [main].into_iter().chain(parts).collect();
        let whole = |file: usize, max: usize| (file, 0, files[file].len().min(max));
        let mut tables = vec![whole(0, 4096)];
        match kind {
            Kind::Vmdk if options.contains("Extent") => tables.push(whole(files.len() - 1, 4096)),
            // The tables of sparse images follow the space for the descriptor.
            Kind::Vmdk => tables.push(whole(0, 64 << 10)),
            Kind::Vdi | Kind::Vhd | Kind::VhdSized(_) => {}
            Kind::Vhdx => {
                for at in [64 << 10, 128 << 10, 192 << 10, 256 << 10] {
                    tables.push((0, at, 96));
                }
                // The log, the block table and the metadata occupy one MiB each.
                for at in [1 << 20, 2 << 20, 3 << 20] {
                    tables.push((0, at, 256));
                    tables.push((0, at + (64 << 10), 64));
                }
            }
        }
        Good {
            kind,
            files,
            tables,
        }
    }

    /// Returns the files with some bytes of the tables changed.
    fn changed(&self, rng: &mut Rng) -> Vec<Vec<u8>> {
        let mut files = self.files.clone();
        for _ in 0..1 + rng.below(3) {
            let (file, at, len) = self.tables[rng.below(self.tables.len() as u64) as usize];
            let at = at + rng.below(len as u64) as usize;
            let byte = &mut files[file][at];
            *byte = match rng.below(4) {
                0 => 0,
                1 => 0xff,
                2 => *byte ^ (1 << rng.below(8)),
                _ => rng.next() as u8,
            };
        }
        if self.kind == Kind::Vhdx {
            for (start, len) in [(64, 4), (128, 4), (192, 64), (256, 64)] {
                sum_vhdx(&mut files[0][start << 10..(start + len) << 10], 4);
            }
        }
        if self.kind == Kind::Vhd {
            let len = files[0].len();
            for (at, sum, count) in [(0, 64, 512), (512, 548, 1024), (len - 512, len - 448, 512)] {
                files[0][sum..sum + 4].fill(0);
                let bytes = files[0][at..at + count].iter();
                let added: u32 = bytes.map(|byte| u32::from(*byte)).sum();
                files[0][sum..sum + 4].copy_from_slice(&(!added).to_be_bytes());
            }
        }
        files
    }
}

/// Returns the usual number of rounds, multiplied by the environment variable `FATHOM_ROUNDS`.
fn rounds(usual: u32) -> u32 {
    let times = std::env::var("FATHOM_ROUNDS").map(|times| times.parse().expect("a number"));
    usual * times.unwrap_or(1)
}

fn open(kind: Kind, files: &[Vec<u8>]) -> Option<Image> {
    let start = Start::read(kind, &files[0]).ok()?;
    // A changed descriptor may name other files, so the existing files are used in turn.
    let parts = files[1..].iter().cycle().take(start.names().len());
    let parts: Vec<Vec<u8>> = parts.cloned().collect();
    start.open(&files[0], &parts).ok()
}

fn bytes(files: &[Vec<u8>]) -> Vec<&dyn Bytes> {
    files.iter().map(|file| file as &dyn Bytes).collect()
}

#[test]
fn tables_may_say_anything() {
    let (dir, mut rng) = (Dir::new(), Rng(1));
    dir.write("raw", &disk((2 << 20) + 1024, 9));
    for (kind, options) in MADE_BY_QEMU {
        let good = Good::new(&dir, kind, options);
        let mut well = 0;
        for _ in 0..rounds(150) {
            let files = good.changed(&mut rng);
            if let Some(image) = open(kind, &files) {
                well += 1;
                walk(&image, &bytes(&files));
            }
        }
        assert!(well > 0, "{kind} {options}");
    }
}

/// If both Fathom and QEMU can read a changed image, they read the same data.
#[test]
fn changed_images_read_as_with_qemu() {
    let (dir, mut rng) = (Dir::new(), Rng(2));
    dir.write("raw", &disk((2 << 20) + 1024, 9));
    for (kind, options) in MADE_BY_QEMU {
        // Only the first file of an image is written below, so images in several files are skipped.
        if options.contains("Flat") || options.contains("twoGb") {
            continue;
        }
        let good = Good::new(&dir, kind, options);
        let mut same = 0;
        for round in 0..rounds(25) {
            let files = good.changed(&mut rng);
            let Some(image) = open(kind, &files).filter(|image| image.size() < 64 << 20) else {
                continue;
            };
            dir.write("changed", &files[0]);
            let Some(theirs) = dir.read_by_qemu(kind, "changed") else {
                continue;
            };
            let ours = read(&image, &bytes(&files), u64::MAX);
            assert!(ours == theirs, "{kind} {options} {round}");
            same += 1;
        }
        assert!(same > 0, "{kind} {options}");
    }
}

#[test]
fn images_may_end_anywhere() {
    let (dir, mut rng) = (Dir::new(), Rng(3));
    dir.write("raw", &disk((2 << 20) + 1024, 9));
    for (kind, options) in MADE_BY_QEMU {
        let good = Good::new(&dir, kind, options);
        for round in 0..rounds(100) {
            let mut files = good.files.clone();
            let file = rng.below(files.len() as u64) as usize;
            let len = files[file].len() as u64;
            let end = match round % 4 {
                0 => rng.below(len.min(4096) + 1),
                1 => rng.below(len.min(512 << 10) + 1),
                2 => rng.below(len) / 512 * 512,
                _ => len - rng.below(len.min(2048) + 1),
            };
            files[file].truncate(end as usize);
            if let Some(image) = open(kind, &files) {
                walk(&image, &bytes(&files));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn anything_is_read(
        mut data in prop::collection::vec(any::<u8>(), 0..3000),
        magic in 0usize..6,
    ) {
        image(&data);
        let magic: &[u8] = [
            &b"KDMV"[..], b"COWD", b"# Disk DescriptorFile\n", b"vhdxfile", b"conectix", b"",
        ][magic];
        data.splice(..data.len().min(magic.len()), magic.iter().copied());
        image(&data);
    }

    #[test]
    fn descriptors_may_say_anything(
        lines in prop::collection::vec(
            "(RW|RDONLY|NOACCESS|CID=|parentCID=) ?[0-9a-f]{0,9} ?(FLAT|SPARSE|ZERO|SESPARSE|)\
             ( \"[a-c./]{0,3}\")?( [0-9]{1,2})?",
            0..6,
        ),
        tail in prop::collection::vec(any::<u8>(), 0..2000),
    ) {
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"vmfs\"\n{}\n\0",
            lines.join("\n"),
        );
        image(&[text.as_bytes(), &tail].concat());
    }
}
