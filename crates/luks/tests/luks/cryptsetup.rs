//! Exchanges headers between cryptsetup and this crate.

use crate::support::{Dir, NO_EFFORT, QUICK, passphrase};
use fathom_luks::{Bytes, Error, Hash, Header, Options, Sectors, create};

/// Formats an image with cryptsetup and `args`, and checks that both programs find the same volume
/// key.
fn same_key(args: &[&str]) -> Header {
    let dir = Dir::new();
    let key = dir.format("image", args);
    let file = dir.open("image");
    let header = Header::read(&file).unwrap_or_else(|error| panic!("{args:?}: {error}"));
    let found = header.unlock(&file, &key).unwrap();
    assert_eq!(found.bytes(), dir.volume_key("image", "key"), "{args:?}");
    assert!(header.check(&found));
    assert!(matches!(
        header.unlock(&file, &passphrase("wrong")),
        Err(Error::WrongKey)
    ));
    header
}

#[test]
fn version_1() {
    for hash in ["sha1", "sha256", "sha512"] {
        for (cipher, bits) in [("aes-xts-plain64", "512"), ("aes-xts-plain", "256")] {
            let own = ["--type", "luks1", "--hash", hash];
            let cipher = ["--cipher", cipher, "--key-size", bits];
            let header = same_key(&[&own[..], &cipher[..], &QUICK[..]].concat());
            assert_eq!(header.version(), 1);
            assert_eq!(header.describe().hash, hash);
            assert_eq!(header.describe().key_bits.to_string(), bits);
        }
    }
}

#[test]
fn version_2_with_pbkdf2() {
    for hash in ["sha1", "sha256", "sha512"] {
        let own = ["--type", "luks2", "--hash", hash, "--sector-size", "512"];
        let header = same_key(&[&own[..], &QUICK[..]].concat());
        assert_eq!(header.version(), 2);
        assert_eq!(header.payload().sector_size, 512);
    }
}

#[test]
fn version_2_with_argon2() {
    for pbkdf in ["argon2i", "argon2id"] {
        for threads in ["1", "2", "4"] {
            let own = ["--type", "luks2", "--sector-size", "4096", "--pbkdf", pbkdf];
            let effort = ["--pbkdf-force-iterations", "4", "--pbkdf-memory", "64"];
            let threads = ["--pbkdf-parallel", threads, "--key-size", "256"];
            let header = same_key(&[&own[..], &effort[..], &threads[..]].concat());
            assert_eq!(header.payload().sector_size, 4096);
            assert_eq!(header.payload().key_bytes, 32);
            assert_eq!(header.describe().slots[0].kdf, Some(pbkdf));
        }
    }
}

#[test]
fn other_sizes_of_metadata() {
    let own = ["--type", "luks2", "--luks2-metadata-size", "1m"];
    let header = same_key(&[&own[..], &["--offset", "20480"], &QUICK[..]].concat());
    assert_eq!(header.payload().offset, 20480 * 512);
}

#[test]
fn ours_are_cryptsetups() {
    for version in [1, 2] {
        for hash in [Hash::Sha1, Hash::Sha256, Hash::Sha512] {
            let dir = Dir::new();
            let options = Options {
                version,
                hash,
                effort: NO_EFFORT,
                sector_size: [512, 512, 4096][version as usize],
            };
            let made = create(&options, &dir.key("key")).unwrap();
            dir.write("image", &made.bytes);
            dir.open("image").set_len(20 << 20).unwrap();
            assert!(dir.opens("image", "key"));
            dir.key("other");
            assert!(!dir.opens("image", "other"));
            assert_eq!(made.key.bytes(), dir.volume_key("image", "key"));
            let dump = dir.run("cryptsetup", &["luksDump", "image"]);
            let header = Header::read(&dir.open("image")).unwrap();
            assert!(
                dump.contains(header.uuid()) && dump.contains(hash.name()),
                "{dump}"
            );
        }
    }
}

/// Overwrites `len` bytes at `at` in one copy of the header and checks that the other copy
/// suffices.
fn damaged(at: usize, len: usize) {
    let dir = Dir::new();
    let key = dir.format("image", &[&["--type", "luks2"], &QUICK[..]].concat());
    let volume_key = dir.volume_key("image", "key");
    let mut bytes = dir.read("image");
    bytes[at..at + len].fill(0);
    let header = Header::read(&bytes).unwrap();
    assert_eq!(header.unlock(&bytes, &key).unwrap().bytes(), volume_key);
}

#[test]
fn one_copy_is_enough() {
    damaged(0, 4096);
    damaged(4096, 100);
    damaged(16384, 4096);
    damaged(16384 + 4096, 100);
}

#[test]
fn none_is_not() {
    let dir = Dir::new();
    dir.format("image", &[&["--type", "luks2"], &QUICK[..]].concat());
    let mut bytes = dir.read("image");
    bytes[4100] ^= 1;
    bytes[16384 + 4100] ^= 1;
    let error = Header::read(&bytes).unwrap_err();
    assert!(matches!(error, Error::Damaged(_)), "{error}");
    let nothing = vec![0; 1 << 20];
    assert!(matches!(Header::read(&nothing), Err(Error::NotLuks)));
    assert!(matches!(Header::read(&vec![0; 3]), Err(Error::NotLuks)));
    assert_eq!(Bytes::len(&nothing).unwrap(), 1 << 20);
}

/// Fills a file with random bytes and encrypts it in place with cryptsetup.
///
/// Returns the bytes before the encryption.
fn encrypted(dir: &Dir, more: &[&str]) -> Vec<u8> {
    let mut plain = vec![0; 1 << 20];
    getrandom::fill(&mut plain).unwrap();
    dir.write("image", &plain);
    dir.open("image").set_len((1 << 20) + (32 << 20)).unwrap();
    let encrypt = ["reencrypt", "--encrypt", "--force-offline-reencrypt"];
    let size = [
        "--batch-mode",
        "--reduce-device-size",
        "32m",
        "--key-file",
        "key",
    ];
    let all = [&encrypt[..], &size[..], &QUICK[..], more, &["image"]].concat();
    dir.run("cryptsetup", &all);
    plain
}

#[test]
fn we_read_what_cryptsetup_encrypted() {
    for size in ["512", "1024", "2048", "4096"] {
        let dir = Dir::new();
        let key = dir.key("key");
        let plain = encrypted(&dir, &["--type", "luks2", "--sector-size", size]);
        let file = dir.open("image");
        let header = Header::read(&file).unwrap();
        let payload = header.payload();
        assert_eq!(payload.sector_size.to_string(), size);
        let sectors = Sectors::new(&header.unlock(&file, &key).unwrap(), payload.sector_size);
        let mut area = vec![0; plain.len()];
        file.read_at(&mut area, payload.offset).unwrap();
        sectors.with_iv(payload.iv).decrypt(&mut area, 0);
        assert!(area == plain, "sectors of {size} bytes");
    }
}

#[test]
fn a_disk_that_is_being_encrypted_is_refused() {
    let dir = Dir::new();
    dir.key("key");
    encrypted(&dir, &["--type", "luks2", "--init-only"]);
    let error = Header::read(&dir.open("image")).unwrap_err().to_string();
    assert!(error.contains("online-reencrypt"), "{error}");
}

#[test]
fn a_slot_to_be_ignored_opens_by_its_number() {
    let dir = Dir::new();
    let key = dir.format("image", &[&["--type", "luks2"], &QUICK[..]].concat());
    let ignore = ["config", "--priority", "ignore", "--key-slot", "0", "image"];
    dir.run("cryptsetup", &ignore);
    let file = dir.open("image");
    let header = Header::read(&file).unwrap();
    assert!(header.unlock(&file, &key).is_err());
    assert!(header.unlock_slot(&file, &key, 0).is_ok());
    assert!(matches!(
        header.unlock_slot(&file, &key, 1),
        Err(Error::NoSuchSlot(1))
    ));
}
