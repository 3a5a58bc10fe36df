//! Images of each format that qemu-img creates.

use crate::support::{Dir, MADE_BY_QEMU, disk};
use fathom_foreign::{Details, Kind, Place, VhdSize};
use serde_json::{Value, json};

#[test]
fn images_read_as_what_they_were_made_of() {
    // The second size is not a multiple of any block or grain size.
    for size in [24 << 20, (5 << 20) + 3 * 512] {
        let (dir, raw) = (Dir::new(), disk(size, size as u64));
        dir.write("raw", &raw);
        for (kind, options) in MADE_BY_QEMU {
            dir.convert(kind, options, "image");
            let opened = dir.open(kind, "image").expect(options);
            assert_eq!(opened.image.size(), size as u64, "{kind} {options}");
            for step in [u64::MAX, 100_000] {
                let read = opened.read(step);
                assert!(read == raw, "{kind} {options} {size} {step}");
            }
        }
    }
}

#[test]
fn images_that_were_written_to_read_so() {
    let creations = [
        (Kind::Vmdk, "subformat=monolithicSparse"),
        (Kind::Vmdk, "subformat=twoGbMaxExtentSparse"),
        (Kind::Vmdk, "subformat=monolithicFlat"),
        (Kind::Vhdx, "block_size=1M"),
        (Kind::Vdi, "static=off"),
        (Kind::Vhd, "subformat=dynamic"),
    ];
    for (kind, options) in creations {
        let dir = Dir::new();
        // The disk is so large that VHDX has bitmap entries in its block table (one per 4 GiB), and
        // that VMDK has several files.
        let create = [
            "create",
            "-f",
            kind.qemu_name(),
            "-o",
            options,
            "image",
            "10G",
        ];
        dir.run("qemu-img", &create);
        let writes = [
            (1, 0, 65536),
            (2, (4 << 30) - 4096, 8192),
            (3, (2 << 30) - 512, 1024),
            (4, 5 << 30, 3 << 20),
            (5, (9 << 30) + 12345 * 512, 512),
        ];
        let commands = writes.map(|(byte, at, len)| format!("write -P {byte} {at} {len}"));
        let mut args = vec!["-f", kind.qemu_name()];
        args.extend(commands.iter().flat_map(|command| ["-c", command]));
        args.push("image");
        dir.run("qemu-io", &args);

        let opened = dir.open(kind, "image").unwrap();
        let read = |offset: u64| {
            let extent = opened.image.lookup(offset, 512);
            let mut sector = [0; 512];
            match extent.place {
                Place::Zero => {}
                Place::Data { file, at } => {
                    let file = &opened.files[file];
                    std::os::unix::fs::FileExt::read_exact_at(file, &mut sector, at).unwrap();
                }
                Place::Compressed(_) => panic!("a compressed grain"),
            }
            assert!(
                sector.iter().all(|byte| *byte == sector[0]),
                "{kind} {offset}"
            );
            sector[0]
        };
        for (byte, at, len) in writes {
            let found = [at, at + len - 512].map(read);
            assert_eq!(found, [byte; 2], "{kind} {options} {at}");
            if at > 0 {
                assert_eq!(read(at - 512), 0, "{kind} {options} {at}");
            }
            assert_eq!(read(at + len), 0, "{kind} {options} {at}");
        }
    }
}

/// Returns the extents that QEMU reports as data: offset on the disk, length, and offset in the
/// file.
fn mapped(map: &Value) -> Vec<(u64, u64, u64)> {
    let mut data: Vec<(u64, u64, u64)> = Vec::new();
    for entry in map.as_array().unwrap() {
        let number = |name: &str| entry[name].as_u64();
        let (start, length) = (number("start").unwrap(), number("length").unwrap());
        if entry["data"] == json!(true) {
            let at = number("offset").unwrap_or(0);
            push(&mut data, start, length, at);
        }
    }
    data
}

/// Appends an extent, merging it with the last one if both are contiguous on the disk and in the
/// file.
fn push(data: &mut Vec<(u64, u64, u64)>, start: u64, length: u64, at: u64) {
    match data.last_mut() {
        Some((last, len, place)) if *last + *len == start && *place + *len == at => *len += length,
        _ => data.push((start, length, at)),
    }
}

#[test]
fn data_is_where_qemu_says() {
    let dir = Dir::new();
    dir.write("raw", &disk(24 << 20, 7));
    for (kind, options) in [
        (Kind::Vmdk, "subformat=monolithicSparse"),
        (Kind::Vmdk, "subformat=monolithicSparse,zeroed_grain=on"),
        (Kind::Vdi, "static=off"),
        (Kind::Vhd, "subformat=dynamic,force_size=on"),
    ] {
        dir.convert(kind, options, "image");
        let (mut data, mut start) = (Vec::new(), 0);
        for (len, place) in dir.open(kind, "image").unwrap().extents() {
            if let Place::Data { at, .. } = place {
                push(&mut data, start, len, at);
            }
            start += len;
        }
        assert!(data.len() > 3, "{data:?}");
        assert_eq!(
            data,
            mapped(&dir.told("map", kind, "image")),
            "{kind} {options}"
        );
    }
    dir.convert(Kind::Vmdk, "subformat=streamOptimized", "image");
    let map = dir.told("map", Kind::Vmdk, "image");
    let entries = map.as_array().unwrap().iter();
    let theirs: u64 = { entries.filter(|entry| entry["compressed"] == json!(true)) }
        .map(|entry| entry["length"].as_u64().unwrap())
        .sum();
    let extents = dir.open(Kind::Vmdk, "image").unwrap().extents();
    let compressed = extents
        .iter()
        .filter(|(_, place)| matches!(place, Place::Compressed(_)));
    assert_eq!(compressed.map(|(len, _)| len).sum::<u64>(), theirs);
}

#[test]
fn descriptions_are_those_of_qemu() {
    let dir = Dir::new();
    dir.write("raw", &disk(3 << 20, 1));
    for (kind, options) in MADE_BY_QEMU {
        dir.convert(kind, options, "image");
        let theirs = dir.told("info", kind, "image");
        let opened = dir.open(kind, "image").unwrap();
        let ours = opened.image.describe();
        assert_eq!(json!(ours.kind.qemu_name()), theirs["format"]);
        assert_eq!(json!(ours.size), theirs["virtual-size"]);
        assert_eq!(
            json!(ours.block_size),
            theirs.get("cluster-size").cloned().unwrap_or_default(),
            "{kind} {options}"
        );
        let fixed = options.contains("fixed") || options.contains("static=on");
        match &ours.details {
            Details::Vmdk { extents, .. } => {
                let mut theirs = theirs["format-specific"]["data"].clone();
                for (index, extent) in extents.iter().enumerate() {
                    let file = theirs["extents"][index].as_object_mut().unwrap();
                    let file = file.remove("filename").unwrap();
                    let name = extent.name.as_deref().unwrap_or("image");
                    assert_eq!(file, json!(name));
                }
                assert_eq!(serde_json::to_value(&ours.details).unwrap(), theirs);
            }
            Details::Vhdx {
                fixed: found,
                logical_sector_size,
                physical_sector_size,
                log_changes,
            } => {
                assert_eq!(*found, fixed);
                assert_eq!((*logical_sector_size, *physical_sector_size), (512, 512));
                assert_eq!(*log_changes, 0);
            }
            Details::Vdi { fixed: found } => assert_eq!(*found, fixed),
            Details::Vhd {
                fixed: found,
                creator,
            } => {
                assert_eq!(*found, fixed);
                assert_eq!(creator, "qem2");
            }
        }
    }
}

#[test]
fn formats_are_found() {
    let dir = Dir::new();
    dir.write("raw", &disk(3 << 20, 1));
    for (kind, options) in MADE_BY_QEMU {
        dir.convert(kind, options, "image");
        let image = dir.read("image");
        let found = Kind::of_start(&image[..image.len().min(Kind::START)]);
        if options.contains("subformat=fixed,force") {
            assert_eq!(found, None);
        } else {
            assert_eq!(found, Some(kind), "{options}");
        }
        for other in Kind::ALL.into_iter().filter(|other| *other != kind) {
            let error = dir.open(other, "image").err().unwrap().to_string();
            assert!(error.contains(&format!("not a {other} image")), "{error}");
        }
    }
}

/// Creates a dynamic VHD image with this creator, whose geometry is smaller than its size field.
///
/// Returns false if qemu-img fails.
fn make_vhd(dir: &Dir, creator: &[u8; 4], size: &str) -> bool {
    let create = ["create", "-f", "vpc", "-o", "force_size=on", "image", size];
    if !dir.try_run("qemu-img", &create).status.success() {
        return false;
    }
    let mut footer = dir.read("image")[..512].to_vec();
    footer[28..32].copy_from_slice(creator);
    // Cylinders, heads and sectors. `force_size` sets them to their maximum, for which QEMU ignores
    // them.
    footer[56..60].copy_from_slice(&[0, 100, 16, 63]);
    footer[64..68].fill(0);
    let sum: u32 = footer.iter().map(|byte| u32::from(*byte)).sum();
    footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
    dir.patch("image", 0, &footer);
    true
}

/// QEMU before 10.0 knows these creators and computes the same sizes as later versions.
#[test]
fn vhd_sizes_are_those_of_qemu() {
    let dir = Dir::new();
    for creator in [
        b"vpc ", b"qemu", b"qem2", b"win ", b"d2v ", b"tap\0", b"CTXS",
    ] {
        for size in ["100000K", "2T", "127G"] {
            if !make_vhd(&dir, creator, size) {
                continue;
            }
            let theirs = dir.told("info", Kind::Vhd, "image");
            let ours = dir.open(Kind::Vhd, "image").unwrap().image.size();
            assert_eq!(json!(ours), theirs["virtual-size"], "{creator:?} {size}");
        }
    }
}

#[test]
fn vhd_of_unlisted_creator_has_its_current_size() {
    let dir = Dir::new();
    let size = |kind| dir.open(kind, "image").unwrap().image.size();
    for creator in [b"vbox", b"wa\0\0", b"x\0\0\0"] {
        assert!(make_vhd(&dir, creator, "100000K"));
        assert_eq!(size(Kind::Vhd), 100_000 << 10);
        let by_geometry = size(Kind::VhdSized(VhdSize::Geometry));
        assert!(by_geometry < 100_000 << 10, "{by_geometry}");
    }
    assert!(make_vhd(&dir, b"vpc ", "100000K"));
    assert_eq!(size(Kind::VhdSized(VhdSize::Current)), 100_000 << 10);
    assert_eq!(size(Kind::Vhd), size(Kind::VhdSized(VhdSize::Geometry)));
}
