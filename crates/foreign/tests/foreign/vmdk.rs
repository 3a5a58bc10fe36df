//! VMDK images that qemu-img reads but does not create, and images that must be refused.

use crate::support::esx;

use crate::support::{Dir, disk, open_bytes};
use fathom_foreign::{Details, Error, Kind, Place};

fn descriptor(create_type: &str, extents: &str) -> String {
    format!(
        "# Disk DescriptorFile\nversion=1\nencoding=\"UTF-8\"\nCID=0abc1234\n\
         parentCID=ffffffff\ncreateType=\"{create_type}\"\n\n# Extent description\n{extents}\n\
         # The Disk Data Base\n#DDB\n\nddb.adapterType = \"ide\"\n"
    )
}

#[test]
fn extents_of_esx_read_as_qemu_reads_them() {
    // The disk has more than 4096 grains with data, so that both halves of a seSparse grain number
    // are used.
    let mut raw = disk((60 << 20) + 5 * 512, 3);
    raw[20 << 20..37 << 20].fill(0);
    let dir = Dir::new();
    dir.write("cowd", &esx::cowd(&raw));
    dir.write("sesparse", &esx::sesparse(&raw));
    dir.write("flat", &[&[9; 1024], &raw[..]].concat());
    let sectors = raw.len() / 512;
    for (create_type, form, name) in [
        ("vmfsSparse", "VMFSSPARSE", "cowd"),
        ("seSparse", "SESPARSE", "sesparse"),
        ("monolithicFlat", "FLAT", "flat"),
    ] {
        let offset = if form == "FLAT" { "2" } else { "" };
        let extent = format!("RW {sectors} {form} \"{name}\" {offset}\n");
        dir.write("image", descriptor(create_type, &extent).as_bytes());
        let theirs = dir.read_by_qemu(Kind::Vmdk, "image");
        assert!(theirs.expect(form) == raw, "QEMU reads {form}");
        let opened = dir.open(Kind::Vmdk, "image").unwrap();
        assert!(opened.read(u64::MAX) == raw, "{form}");
        let theirs = dir.told("info", Kind::Vmdk, "image");
        let mut theirs = theirs["format-specific"]["data"].clone();
        theirs["extents"][0]
            .as_object_mut()
            .unwrap()
            .remove("filename");
        let ours = serde_json::to_value(&opened.image.describe().details).unwrap();
        assert_eq!(ours, theirs);
    }
}

#[test]
fn extents_follow_each_other_and_some_are_zeroes() {
    let text = descriptor(
        "twoGbMaxExtentFlat",
        "RW 2 FLAT \"one\" 1\r\nRDONLY 3 ZERO\nNOACCESS 4 ZERO\nrw  5  flat \"two\" 0\n\
         RW 1 VMFS \"one\"",
    );
    let one: Vec<u8> = (0..2048_u32).map(|i| (i / 512) as u8).collect();
    let parts = [one, vec![7; 2560]];
    let image = open_bytes(Kind::Vmdk, &text.clone().into_bytes(), &parts).unwrap();
    assert_eq!(image.size(), 15 * 512);
    let at = |sector: u64| image.lookup(sector * 512 + 1, u64::MAX / 2);
    let data = |file, at| Place::Data { file, at };
    let expected = [
        (0, 1023, data(1, 513)),
        (1, 511, data(1, 1025)),
        (2, 1535, Place::Zero),
        (5, 2047, Place::Zero),
        (9, 2559, data(2, 1)),
        (14, 511, data(1, 1)),
    ];
    for (sector, len, place) in expected {
        assert_eq!((at(sector).len, at(sector).place), (len, place), "{sector}");
    }
    let details = &image.describe().details;
    let Details::Vmdk { cid, extents, .. } = details else {
        panic!("{details:?}");
    };
    assert_eq!(*cid, 0x0abc_1234);
    let names: Vec<_> = { extents.iter() }
        .map(|extent| extent.name.as_deref())
        .collect();
    assert_eq!(names, [Some("one"), None, None, Some("two"), Some("one")]);
    // A sparse file that contains only a descriptor.
    let mut file = vec![0; 1024];
    file[..4].copy_from_slice(b"KDMV");
    (file[4], file[28], file[36]) = (1, 2, 20);
    file.extend(text.into_bytes());
    file.resize(11 << 10, 0);
    assert_eq!(
        open_bytes(Kind::Vmdk, &file, &parts).unwrap().size(),
        15 * 512
    );
}

fn refused(text: &str, words: &str) -> Error {
    let error = fathom_foreign::Start::read(Kind::Vmdk, &text.as_bytes().to_vec());
    let error = error.and_then(|start| {
        let part: Vec<u8> = vec![0; 4096];
        start.open(&Vec::new(), &vec![part; start.names().len()])
    });
    let error = error.expect_err(words);
    let said = error.to_string();
    assert!(said.contains(words), "no {words:?} in: {said}");
    assert!(!said.contains('\n') && said.len() < 500, "{said}");
    error
}

#[test]
fn an_image_names_no_files_but_those_next_to_it() {
    for name in [
        "/etc/passwd",
        "../secret",
        "..",
        ".",
        "a/b",
        "a\\b",
        "C:\\disk.vmdk",
        "a..b",
        "nbd://host/disk",
        "tab\there",
        &"long".repeat(64),
    ] {
        let extent = format!("RW 1 FLAT \"{name}\" 0");
        refused(&descriptor("monolithicFlat", &extent), "bare file name");
    }
    // Bad names are refused even if there is no data to read.
    refused(&descriptor("vmfs", "RW 1 VMFS \"\""), "bare file name");
    refused(
        &descriptor("fullDevice", "RW 1 FLAT \"/dev/sda\" 0"),
        "bare file name",
    );
}

#[test]
fn each_contradiction_of_a_descriptor_is_told() {
    let good = descriptor("monolithicFlat", "RW 8 FLAT \"a\" 0");
    let with = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        good.replace(from, to)
    };
    refused(&with("version=1", "version=4"), "version \"4\"");
    refused(&with("CID=0abc1234\n", ""), "no CID");
    refused(&with("parentCID=ffffffff", ""), "no parentCID");
    refused(&with("CID=0abc1234", "CID=xyz"), "wrong CID");
    refused(&with("=ffffffff", "=ffffffff0"), "wrong CID");
    refused(&with("monolithicFlat", "fullDevice"), "fullDevice");
    refused(&with("createType", "otherType"), "type \"\"");
    for parent in [
        "parentCID=00000000",
        "parentCID=ffffffff\nparentFileNameHint=\"b\"",
    ] {
        let error = refused(&with("parentCID=ffffffff", parent), "qemu-img convert");
        assert!(matches!(error, Error::Differencing { .. }), "{error}");
    }
    refused(&with("RW 8 FLAT \"a\" 0", ""), "no extents");
    for (extent, words) in [
        ("RW 0 FLAT \"a\" 0", "wrong extent"),
        ("RW -1 FLAT \"a\" 0", "wrong extent"),
        ("RW 99999999999999999999 FLAT \"a\" 0", "wrong extent"),
        ("RW 8 FLAT \"a\"", "wrong extent"),
        ("RW 8 FLAT \"a\" -1", "wrong extent"),
        ("RW 8 FLAT \"a\" 0 partitionUUID", "wrong extent"),
        ("RW 8 FLAT a 0", "wrong extent"),
        ("RW 8 FLAT \"a 0", "wrong extent"),
        ("RW 8 LUMP \"a\" 0", "wrong extent"),
        ("RW 8 SPARSE \"a\" 0", "wrong extent"),
        ("RW 8 9 FLAT \"a\" 0", "wrong extent"),
        ("RW 8", "wrong extent"),
        ("RW", "wrong extent"),
        ("NOACCESS 8 FLAT \"a\" 0", "may not be accessed"),
        (
            "RW 9 FLAT \"a\" 0",
            "in \"a\", an extent of 4608 bytes is at 0",
        ),
        ("RW 8 FLAT \"a\" 1", "its file ends at 4096"),
        ("RW 8 VMFS \"a\" 18014398509481984", "its file ends at 4096"),
        ("RW 8 FLAT \"a\" 18014398509481985", "wrong extent"),
        ("RW 8 SPARSE \"a\"", "not a sparse"),
        ("RW 8 SESPARSE \"a\"", "not a seSparse"),
    ] {
        refused(&with("RW 8 FLAT \"a\" 0", extent), words);
    }
    let huge = "RW 9007199254740993 ZERO\n".repeat(2);
    refused(&with("RW 8 FLAT \"a\" 0", &huge), "256 MiB");
    let many: String = (0..4097)
        .map(|i| format!("RW 1 FLAT \"{i}\" 0\n"))
        .collect();
    refused(&with("RW 8 FLAT \"a\" 0", &many), "512 files");
    refused(
        &with("RW 8 FLAT \"a\" 0", &"RW 1 ZERO\n".repeat(16385)),
        "256 MiB",
    );
    refused("version=9\n", "not a VMDK");
}

#[test]
fn parts_are_those_that_are_named() {
    let text = descriptor("vmfs", "RW 8 VMFS \"a\"\nRW 8 VMFS \"b\"\nRW 8 VMFS \"a\"");
    let main = text.into_bytes();
    let start = fathom_foreign::Start::read(Kind::Vmdk, &main).unwrap();
    assert_eq!(start.names(), ["a", "b"]);
    let error = start.open(&main, &[vec![0; 4096]]).unwrap_err();
    assert!(
        matches!(error, Error::Parts { named: 2, given: 1 }),
        "{error}"
    );
}

#[test]
fn a_part_alone_is_no_image() {
    let dir = Dir::new();
    dir.write("raw", &disk(1 << 20, 2));
    dir.convert(Kind::Vmdk, "subformat=twoGbMaxExtentSparse", "image.vmdk");
    dir.write("cowd", &esx::cowd(&disk(1 << 20, 2)));
    for part in ["image-s001.vmdk", "cowd"] {
        let error = dir.open(Kind::Vmdk, part).err().unwrap().to_string();
        assert!(
            error.contains("part of a VMDK image: give the text"),
            "{error}"
        );
    }
}

#[test]
fn images_with_a_parent_are_refused() {
    let dir = Dir::new();
    dir.run("qemu-img", &["create", "-f", "vmdk", "base.vmdk", "1M"]);
    let parent = ["-b", "base.vmdk", "-F", "vmdk"];
    let args = [&["create", "-f", "vmdk"][..], &parent, &["image"]];
    dir.run("qemu-img", &args.concat());
    let error = dir.open(Kind::Vmdk, "image").err().unwrap();
    assert!(matches!(error, Error::Differencing { .. }), "{error}");
}
