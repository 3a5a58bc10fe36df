//! Runs QEMU's tools in a directory of images.

pub mod esx;

use fathom_foreign::{Bytes, Image, Kind, Place, Result, Start};
use fathom_testing::MemoryDir;
use std::fs::File;
use std::ops::Deref;
use std::os::unix::fs::FileExt;

/// A directory with images, in memory if possible.
pub struct Dir(MemoryDir);

impl Deref for Dir {
    type Target = MemoryDir;

    fn deref(&self) -> &MemoryDir {
        &self.0
    }
}

impl Dir {
    pub fn new() -> Dir {
        Dir(MemoryDir::new())
    }

    /// Overwrites a part of a file.
    pub fn patch(&self, name: &str, at: u64, bytes: &[u8]) {
        let file = File::options().write(true).open(self.path(name));
        let file = file.expect("a file");
        file.write_all_at(bytes, at).expect("a write");
    }

    /// Creates the image `name` from the raw file "raw" using `qemu-img convert`.
    pub fn convert(&self, kind: Kind, options: &str, name: &str) {
        let mut args = vec!["convert", "-f", "raw", "-O", kind.qemu_name()];
        if !options.is_empty() {
            args.extend(["-o", options]);
        }
        args.extend(["raw", name]);
        self.run("qemu-img", &args);
    }

    /// Returns the data that QEMU reads from an image; `None` if QEMU fails.
    pub fn read_by_qemu(&self, kind: Kind, name: &str) -> Option<Vec<u8>> {
        let args = [
            "convert",
            "-f",
            kind.qemu_name(),
            "-O",
            "raw",
            name,
            "theirs",
        ];
        let output = self.try_run("qemu-img", &args);
        output.status.success().then(|| self.read("theirs"))
    }

    pub fn open(&self, kind: Kind, name: &str) -> Result<Opened> {
        let main = File::open(self.path(name)).expect("a file");
        let start = Start::read(kind, &main)?;
        let names = start.names().iter();
        let parts = names.map(|name| File::open(self.path(name)).expect("a part"));
        let parts: Vec<File> = parts.collect();
        let image = start.open(&main, &parts)?;
        let mut files = vec![main];
        files.extend(parts);
        Ok(Opened { image, files })
    }

    /// Returns the output of `qemu-img info` or `qemu-img map`.
    pub fn told(&self, command: &str, kind: Kind, name: &str) -> serde_json::Value {
        let args = [command, "-f", kind.qemu_name(), "--output", "json", name];
        serde_json::from_str(&self.run("qemu-img", &args)).expect("JSON")
    }
}

/// An open image and its files.
pub struct Opened {
    pub image: Image,
    pub files: Vec<File>,
}

impl Opened {
    /// Reads the whole disk, looking up `step` bytes at a time.
    pub fn read(&self, step: u64) -> Vec<u8> {
        let files: Vec<&dyn Bytes> = self.files.iter().map(|file| file as &dyn Bytes).collect();
        read(&self.image, &files, step)
    }

    /// Returns all extents with their lengths and locations.
    pub fn extents(&self) -> Vec<(u64, Place)> {
        let (image, mut offset) = (&self.image, 0);
        let mut extents = Vec::new();
        while offset < image.size() {
            let extent = image.lookup(offset, image.size() - offset);
            extents.push((extent.len, extent.place));
            offset += extent.len;
        }
        extents
    }
}

pub fn read(image: &Image, files: &[&dyn Bytes], step: u64) -> Vec<u8> {
    let mut disk = vec![0; image.size() as usize];
    let mut offset = 0;
    while offset < image.size() {
        let extent = image.lookup(offset, step.min(image.size() - offset));
        assert!(extent.len > 0 && extent.len <= step);
        let part = &mut disk[offset as usize..(offset + extent.len) as usize];
        match extent.place {
            Place::Zero => {}
            Place::Data { file, at } => files[file].read_at(part, at).expect("data"),
            Place::Compressed(grain) => {
                let mut stored = vec![0; grain.len as usize];
                files[grain.file]
                    .read_at(&mut stored, grain.at)
                    .expect("a grain");
                let mut whole = vec![0; grain.size as usize];
                grain.inflate(&stored, &mut whole).expect("a good grain");
                part.copy_from_slice(&whole[grain.skip as usize..][..part.len()]);
            }
        }
        offset += extent.len;
    }
    disk
}

/// Creates a disk of `size` bytes with compressible data, incompressible data and zeroes.
///
/// The three kinds alternate in ranges of random lengths.
pub fn disk(size: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng(seed);
    let mut bytes = Vec::with_capacity(size + (1 << 20));
    while bytes.len() < size {
        let len = 512 * (1 + rng.below(2048) as usize);
        match rng.below(4) {
            0 => bytes.extend((0..len).map(|_| rng.next() as u8)),
            1 => bytes.extend((0..len).map(|i| (i / 7) as u8)),
            _ => bytes.extend(std::iter::repeat_n(0, len * (1 + rng.below(4) as usize))),
        }
    }
    bytes.truncate(size);
    bytes
}

/// Random number generator with the same numbers in each run.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// The formats and options with which qemu-img converts a raw file to an image.
pub const MADE_BY_QEMU: [(Kind, &str); 14] = [
    (Kind::Vmdk, "subformat=monolithicSparse"),
    (Kind::Vmdk, "subformat=monolithicSparse,zeroed_grain=on"),
    (Kind::Vmdk, "subformat=monolithicFlat"),
    (Kind::Vmdk, "subformat=twoGbMaxExtentSparse"),
    (Kind::Vmdk, "subformat=twoGbMaxExtentFlat"),
    (Kind::Vmdk, "subformat=streamOptimized"),
    (Kind::Vmdk, "subformat=monolithicSparse,compat6=on"),
    (Kind::Vhdx, "subformat=dynamic,block_size=1M"),
    (Kind::Vhdx, "subformat=dynamic,block_size=32M"),
    (Kind::Vhdx, "subformat=fixed"),
    (Kind::Vdi, ""),
    (Kind::Vdi, "static=on"),
    (Kind::Vhd, "subformat=dynamic,force_size=on"),
    (Kind::Vhd, "subformat=fixed,force_size=on"),
];

/// Opens an image from memory, with its further files.
pub fn open_bytes(kind: Kind, main: &Vec<u8>, parts: &[Vec<u8>]) -> Result<Image> {
    Start::read(kind, main)?.open(main, parts)
}

/// Sets the 4 bytes at `at` to the VHDX checksum of `bytes`.
pub fn sum_vhdx(bytes: &mut [u8], at: usize) {
    bytes[at..at + 4].fill(0);
    let mut sum = u32::MAX;
    for byte in bytes.iter() {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = (sum >> 1) ^ (0x82f6_3b78 * (sum & 1));
        }
    }
    bytes[at..at + 4].copy_from_slice(&(!sum).to_le_bytes());
}
