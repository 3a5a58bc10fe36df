//! Images with a single defect, each of which must cause an error of one line.

use crate::support::esx;

use crate::support::{Dir, disk, open_bytes, sum_vhdx};
use fathom_foreign::{Error, Kind};

/// Creates a disk with data at its end.
fn raw() -> Vec<u8> {
    let mut raw = disk((3 << 20) + 512, 5);
    raw.splice(3 << 20.., [1; 512]);
    raw
}

/// A valid image, whose checksums can be corrected after a change.
struct Good {
    kind: Kind,
    bytes: Vec<u8>,
}

impl Good {
    fn new(kind: Kind, options: &str) -> Good {
        let dir = Dir::new();
        dir.write("raw", &raw());
        dir.convert(kind, options, "image");
        let bytes = dir.read("image");
        open_bytes(kind, &bytes, &[]).expect(options);
        Good { kind, bytes }
    }

    /// Returns the image with other bytes at `at` and corrected checksums.
    fn with(&self, at: usize, part: &[u8]) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        bytes[at..at + part.len()].copy_from_slice(part);
        match self.kind {
            Kind::Vmdk | Kind::Vdi => {}
            Kind::Vhd | Kind::VhdSized(_) => {
                for (start, sum, len) in [(0, 64, 512), (512, 512 + 36, 1024)] {
                    bytes[sum..sum + 4].fill(0);
                    let all = bytes[start..start + len].iter();
                    let added: u32 = all.map(|byte| u32::from(*byte)).sum();
                    bytes[sum..sum + 4].copy_from_slice(&(!added).to_be_bytes());
                }
            }
            Kind::Vhdx => {
                for (start, len) in [(64, 4), (128, 4), (192, 64), (256, 64)] {
                    sum_vhdx(&mut bytes[start << 10..(start + len) << 10], 4);
                }
            }
        }
        bytes
    }

    fn refused(&self, at: usize, part: &[u8], words: &str) -> Error {
        refused(self.kind, &self.with(at, part), words)
    }
}

fn refused(kind: Kind, bytes: &Vec<u8>, words: &str) -> Error {
    let error = open_bytes(kind, bytes, &[]).expect_err(words);
    let said = error.to_string();
    assert!(said.contains(words), "no {words:?} in: {said}");
    assert!(!said.contains('\n') && said.len() < 400, "{said}");
    error
}

#[test]
fn vdi() {
    let good = Good::new(Kind::Vdi, "");
    refused(Kind::Vdi, &good.bytes[..511].to_vec(), "not a VDI");
    good.refused(0x40, &[0], "not a VDI");
    good.refused(0x44, &[2], "version 1.2");
    for kind in [3, 4] {
        let error = good.refused(0x4c, &[kind], "VBoxManage clonemedium");
        assert!(matches!(error, Error::Differencing { .. }), "{error}");
    }
    good.refused(0x4c, &[5], "type 5");
    good.refused(0x1a8 + 15, &[1], "its parent");
    good.refused(0x1b8, &[1], "its parent");
    good.refused(0x154, &[1], "block map is at");
    good.refused(0x157, &[1], "its file ends at");
    good.refused(0x158, &[1], "first block is at");
    good.refused(0x15b, &[1], "outside of its file");
    good.refused(0x168, &[0, 16], "sector size of 4096");
    good.refused(0x170, &[0xff; 8], "not supported, only of up to");
    good.refused(0x170, &(5_u64 << 20).to_le_bytes(), "4 blocks are too few");
    good.refused(0x178, &[1], "block size of 1048577");
    good.refused(0x17c, &[1], "bytes before each block");
    good.refused(0x180, &[3], "3 blocks are too few");
    good.refused(0x200, &[0xfd, 0xff, 0xff, 0xff], "block at 0 of the disk");
    // The largest disk that QEMU allows needs a table of 4 GiB.
    let mut huge = good.with(0x170, &(0x3fff_ffff_u64 << 20).to_le_bytes());
    huge[0x180..0x184].copy_from_slice(&0x3fff_ffff_u32.to_le_bytes());
    let error = refused(Kind::Vdi, &huge, "256 MiB");
    assert!(matches!(error, Error::TooLarge));
    // Only the bytes of the last block that belong to the guest's disk must be in the file.
    for (lost, is_well) in [((1 << 20) - 512, true), ((1 << 20) - 511, false)] {
        let len = good.bytes.len() - lost;
        let found = open_bytes(Kind::Vdi, &good.bytes[..len].to_vec(), &[]);
        assert_eq!(found.is_ok(), is_well, "{lost}");
    }
}

#[test]
fn vhd() {
    let good = Good::new(Kind::Vhd, "force_size=on");
    let be = |number: u32| number.to_be_bytes();
    refused(Kind::Vhd, &good.bytes[..511].to_vec(), "not a VHD");
    let mut no_sum = good.bytes.clone();
    no_sum[100] ^= 1;
    refused(Kind::Vhd, &no_sum, "checksum of its footer");
    no_sum = good.bytes.clone();
    no_sum[1000] ^= 1;
    refused(Kind::Vhd, &no_sum, "checksum of its dynamic header");
    good.refused(0, b"x", "without the footer's copy");
    good.refused(16, &[0xff; 8], "dynamic header of 1024 bytes");
    good.refused(48, &[0, 0, 2, 0, 0, 0, 0, 0], "sectors, more than");
    let error = good.refused(60, &be(4), "Merge-VHD");
    assert!(matches!(error, Error::Differencing { .. }), "{error}");
    good.refused(60, &be(1), "type 1");
    good.refused(512, b"x", "no dynamic header");
    good.refused(512 + 16, &[0x7f], "table of blocks of");
    good.refused(512 + 28, &be(1), "table of 1 blocks is too short");
    good.refused(512 + 32, &be(3 << 20), "no power of two");
    good.refused(512 + 32, &be(256), "no power of two");
    good.refused(512 + 32, &be(0), "no power of two");
    good.refused(1536, &be(0), "block is where the footer's copy is");
    good.refused(1536, &be(u32::MAX - 1), "outside of its file");
    let fixed = Good::new(Kind::Vhd, "subformat=fixed,force_size=on");
    let short = fixed.bytes[512..].to_vec();
    refused(Kind::Vhd, &short, "its file has room for");
}

#[test]
fn vhdx() {
    let good = Good::new(Kind::Vhdx, "block_size=1M");
    let (headers, table) = ([64 << 10, 128 << 10], 192 << 10);
    // Changes both headers, because either of them may be the newer one.
    let both = |at: usize, part: &[u8]| {
        let mut other = Good {
            kind: Kind::Vhdx,
            bytes: good.bytes.clone(),
        };
        for header in headers {
            other.bytes = other.with(header + at, part);
        }
        other.bytes
    };
    refused(Kind::Vhdx, &good.bytes[..7].to_vec(), "not a VHDX");
    refused(
        Kind::Vhdx,
        &good.bytes[..100 << 10].to_vec(),
        "a header of 4096 bytes",
    );
    refused(
        Kind::Vhdx,
        &both(0, b"x"),
        "no header with a right checksum",
    );
    let mut no_sums = good.bytes.clone();
    for header in headers {
        no_sums[header + 4000] ^= 1;
    }
    refused(Kind::Vhdx, &no_sums, "no header with a right checksum");
    refused(Kind::Vhdx, &both(8, &[7; 8]), "neither of its two headers");
    refused(Kind::Vhdx, &both(66, &[2]), "VHDX version 2");
    refused(Kind::Vhdx, &both(64, &[1]), "log of version 1");
    refused(Kind::Vhdx, &both(68, &[1]), "its log of");
    refused(Kind::Vhdx, &both(72, &[0; 8]), "its log of");
    refused(Kind::Vhdx, &both(72, &[1]), "its log of");
    refused(
        Kind::Vhdx,
        &both(72, &[0, 0, 0xf0, 0xff, 0xff, 0xff, 0xff, 0xff]),
        "its log of",
    );

    // A single valid region table is enough.
    let mut one = good.with(table, b"x");
    assert!(open_bytes(Kind::Vhdx, &one, &[]).is_ok());
    one[(256 << 10) + 100] ^= 1;
    refused(Kind::Vhdx, &one, "no valid table of regions");
    let first = table + 16;
    good.refused(
        table + 8,
        &2048_u32.to_le_bytes(),
        "no valid table of regions",
    );
    good.refused(table + 8, &[1], "no region for its tables");
    good.refused(first, &[0], "no region for its tables");
    let required = Good {
        kind: Kind::Vhdx,
        bytes: good.with(first + 28, &[1]),
    };
    required.refused(first, &[0], "region that must be understood");
    let again = good.bytes[first..first + 16].to_vec();
    good.refused(first + 32, &again, "two regions for the same");
    good.refused(first + 16, &[1], "not in a place for it");
    good.refused(first + 16, &[0; 8], "not in a place for it");
    good.refused(first + 24, &[0; 4], "not in a place for it");
    good.refused(
        first + 16,
        &[0, 0, 0xf0, 0xff, 0xff, 0xff, 0xff, 0xff],
        "place for it",
    );
    let elsewhere = good.bytes[first + 48..first + 56].to_vec();
    good.refused(first + 16, &elsewhere, "regions overlap");
    let log = good.bytes[headers[0] + 72..headers[0] + 80].to_vec();
    good.refused(first + 16, &log, "regions overlap");
    good.refused(first + 16, &[0, 0, 0, 0, 0, 1], "its file ends at");
}

/// Finds `magic` in the tables of an image.
fn find(bytes: &[u8], magic: &[u8]) -> usize {
    let mut places = (1 << 20..bytes.len()).step_by(32);
    places.find(|at| bytes[*at..].starts_with(magic)).unwrap()
}

#[test]
fn metadata_of_vhdx() {
    let good = Good::new(Kind::Vhdx, "block_size=1M");
    let table = find(&good.bytes, b"metadata");
    let entries = [
        ("block size", [0x37, 0x67, 0xa1, 0xca]),
        ("disk size", [0x24, 0x42, 0xa5, 0x2f]),
        ("logical sector size", [0x1d, 0xbf, 0x41, 0x81]),
        ("physical sector size", [0xc7, 0x48, 0xa3, 0xcd]),
    ];
    good.refused(table, b"x", "no valid table of metadata");
    good.refused(
        table + 10,
        &2048_u16.to_le_bytes(),
        "no valid table of metadata",
    );
    let mut items = Vec::new();
    for (what, guid) in entries {
        let entry = find(&good.bytes, &guid);
        let lost = format!("does not have one {what}");
        // The changed GUID is unknown, but the item is marked as required.
        good.refused(entry, &[0], "metadata that must be understood");
        let mut optional = good.with(entry, &[0]);
        optional[entry + 24] &= !4;
        refused(Kind::Vhdx, &optional, &lost);
        good.refused(entry + 16, &[0xff; 4], "not where metadata is");
        good.refused(entry + 20, &[5], "not where metadata is");
        let at = u32::from_le_bytes(good.bytes[entry + 16..entry + 20].try_into().unwrap());
        items.push(table + at as usize);
    }
    good.refused(items[0], &(3_u32 << 20).to_le_bytes(), "no power of two");
    good.refused(items[0], &(512_u32 << 10).to_le_bytes(), "no power of two");
    good.refused(items[0], &(512_u32 << 20).to_le_bytes(), "no power of two");
    let error = good.refused(items[0] + 4, &[2], "Convert-VHD");
    assert!(matches!(error, Error::Differencing { .. }), "{error}");
    good.refused(items[1], &[1], "with sectors of 512 is not possible");
    good.refused(
        items[1],
        &((64_u64 << 40) + 512).to_le_bytes(),
        "is not possible",
    );
    good.refused(
        items[1],
        &(63_u64 << 40).to_le_bytes(),
        "blocks is too short",
    );
    good.refused(items[2], &1024_u32.to_le_bytes(), "sector size is 1024");
    good.refused(items[3], &[0; 4], "sector size is 0");
}

#[test]
fn blocks_of_vhdx() {
    let good = Good::new(Kind::Vhdx, "block_size=1M");
    let table = (192 << 10) + 16;
    let entry = [table, table + 32]
        .into_iter()
        .find(|at| good.bytes[*at] == 0x66)
        .unwrap();
    let blocks = u64::from_le_bytes(good.bytes[entry + 16..entry + 24].try_into().unwrap());
    let at = blocks as usize;
    let block = |offset: u64, state: u64| (offset << 20 | state).to_le_bytes();
    for state in [0, 1, 2, 3, 5] {
        let bytes = good.with(at, &block(9999, state));
        assert!(open_bytes(Kind::Vhdx, &bytes, &[]).is_ok(), "{state}");
    }
    good.refused(at, &block(9, 4), "block 0 has the state 4");
    good.refused(at + 8, &block(9, 7), "block 1 has the state 7");
    good.refused(at, &block(0, 6), "where its tables are");
    good.refused(at, &block(1, 6), "where its tables are");
    good.refused(at, &block(blocks >> 20, 6), "where its tables are");
    good.refused(at, &block((1 << 44) - 1, 6), "outside of its file");
    good.refused(
        at,
        &block(good.bytes.len() as u64 >> 20, 6),
        "outside of its file",
    );
    good.refused(at, &block(1 << 32, 6), "outside of its file");
}

#[test]
fn sparse_vmdk() {
    let good = Good::new(Kind::Vmdk, "");
    refused(Kind::Vmdk, &good.bytes[..3].to_vec(), "not a VMDK");
    refused(
        Kind::Vmdk,
        &good.bytes[..511].to_vec(),
        "its header of 512 bytes",
    );
    good.refused(4, &[4], "version 4");
    good.refused(4, &[0], "version 0");
    good.refused(12, &[0xff; 8], "is not possible");
    good.refused(12, &(1_u64 << 54).to_le_bytes(), "256 MiB");
    good.refused(12, &(1_u64 << 36).to_le_bytes(), "its grain directory of");
    good.refused(20, &[0], "no power of two");
    good.refused(20, &[3], "no power of two");
    good.refused(20, &(1_u64 << 22).to_le_bytes(), "no power of two");
    good.refused(28, &[0xff; 8], "no possible place");
    good.refused(28, &[0; 8], "part of a VMDK image");
    good.refused(44, &[0; 4], "0 grains in a table");
    good.refused(44, &[0, 1], "256 grains in a table");
    good.refused(
        56,
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
        "no grain directory",
    );
    good.refused(56, &[0xff; 4], "its grain directory of");
    good.refused(56, &[0xff; 8], "no footer");
    good.refused(64, &[0xff; 4], "ends before its first grain");
    good.refused(73, b"\r", "as if it were a text");
    good.refused(77, &[2], "compression 2");
    let directory = u64::from_le_bytes(good.bytes[56..64].try_into().unwrap()) as usize * 512;
    good.refused(directory, &[0xff; 4], "a grain table of");
    let table = u32::from_le_bytes(good.bytes[directory..directory + 4].try_into().unwrap());
    good.refused(table as usize * 512, &[0xff; 4], "block at 0 of the disk");
    let text = find_text(&good.bytes, "parentCID=ffffffff");
    let error = good.refused(text, b"parentCID=00000001", "its parent");
    assert!(matches!(error, Error::Differencing { .. }), "{error}");
    let text = find_text(&good.bytes, "RW ");
    good.refused(
        text,
        b"RW 1 ZERO\nRW 1 ZERO\n#",
        "whose descriptor names more",
    );
}

fn find_text(bytes: &[u8], text: &str) -> usize {
    let mut windows = bytes.windows(text.len());
    windows
        .position(|window| window == text.as_bytes())
        .unwrap()
}

#[test]
fn stream_optimized_vmdk() {
    // qemu-img writes no footer; a copy of the header at the end serves as one.
    let mut good = Good::new(Kind::Vmdk, "subformat=streamOptimized");
    let header = good.bytes[..512].to_vec();
    let marker = |kind: u8| {
        let mut marker = vec![0; 512];
        marker[12] = kind;
        marker
    };
    good.bytes.resize(good.bytes.len().next_multiple_of(512), 0);
    good.bytes.extend([marker(3), header, marker(0)].concat());
    good.bytes[56..64].fill(0xff);
    let dir = Dir::new();
    dir.write("image", &good.bytes);
    let theirs = dir
        .read_by_qemu(Kind::Vmdk, "image")
        .expect("QEMU takes it");
    let ours = dir.open(Kind::Vmdk, "image").unwrap().read(u64::MAX);
    assert!(theirs == ours && ours == raw());

    let end = good.bytes.len();
    good.refused(end - 512, &[1], "no footer");
    good.refused(end - 512 + 12, &[1], "no footer");
    good.refused(end - 1024, b"x", "no footer");
    good.refused(end - 1536 + 12, &[2], "no footer");
    good.refused(end - 1536 + 8, &[2], "no footer");
    good.refused(end - 1024 + 21, &[0xff], "up to 2048");
    refused(Kind::Vmdk, &good.bytes[..end - 512].to_vec(), "no footer");
    refused(
        Kind::Vmdk,
        &good.bytes[..512].to_vec(),
        "part of a VMDK image",
    );
}

#[test]
fn extents_of_esx() {
    let raw = disk(1 << 20, 5);
    let text = |form: &str, sectors: usize| {
        format!(
            "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\n\
             createType=\"vmfsSparse\"\nRW {sectors} {form} \"part\"\n"
        )
    };
    let extents = [
        ("VMFSSPARSE", esx::cowd(&raw)),
        ("SESPARSE", esx::sesparse(&raw)),
    ];
    let open = |form: &str, sectors, part: Vec<u8>| {
        open_bytes(Kind::Vmdk, &text(form, sectors).into_bytes(), &[part])
    };
    for (form, part) in &extents {
        assert!(open(form, 2048, part.clone()).is_ok());
        let error = open(form, 2049, part.clone()).unwrap_err().to_string();
        assert!(
            error.contains("2048 sectors, but the descriptor says 2049"),
            "{error}"
        );
    }
    let cases: [(usize, usize, &[u8], &str); 23] = [
        (0, 4, &[2], "version 2"),
        (0, 12, &[0; 4], "extent of 0 sectors"),
        (0, 16, &[0; 4], "grains of 0"),
        (0, 16, &[0xff; 4], "is not possible"),
        (0, 20, &[0xff; 4], "its grain directory of"),
        (0, 24, &[0; 4], "directory is too short"),
        (0, 2048, &[0xff; 4], "a grain table of"),
        (0, 2560, &[0xff; 4], "outside of its file"),
        (1, 0, &[0], "not a seSparse extent"),
        (1, 8, &[2], "version of 0x200000002"),
        (1, 16, &[0; 8], "disk of 0 sectors"),
        (1, 24, &[16], "grain size of 0x10"),
        (1, 32, &[65], "grain table size of 0x41"),
        (1, 48, &[1], "reserved field of 0x1"),
        (1, 87, &[0xff], "no possible place at 80"),
        (1, 149, &[1], "tables are not in its file"),
        (1, 4096, &[99], "a grain table of"),
        (1, 136, &[0; 8], "directory is too short"),
        (1, 511, &[1], "further fields"),
        (1, 512, &[0], "second header"),
        (1, 512 + 24, &[1], "open it once with ESXi"),
        (1, 4096 + 7, &[0x20], "unknown state"),
        (1, 64 * 512 + 7, &[0x40], "unknown state"),
    ];
    for (which, at, bytes, words) in cases {
        let (form, part) = &extents[which];
        let mut part = part.clone();
        part[at..at + bytes.len()].copy_from_slice(bytes);
        let error = open(form, 2048, part).expect_err(words).to_string();
        assert!(error.contains(words), "no {words:?} in: {error}");
    }
}
