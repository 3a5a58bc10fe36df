//! Adds and removes keys, and verifies the result with cryptsetup.

use crate::support::{Dir, NO_EFFORT, QUICK, apply};
use fathom_luks::{Change, Error, Header};

/// Creates an image that the keys "key" and "second" open.
fn two_keys(version: u32) -> Dir {
    let dir = Dir::new();
    dir.create("image", version);
    let changes = added(&dir, "second");
    apply(&dir.open("image"), &changes);
    dir
}

/// Returns the changes that add the key `name` to "image".
fn added(dir: &Dir, name: &str) -> Vec<Change> {
    let (key, new) = (dir.key("key"), dir.key(name));
    let file = dir.open("image");
    let header = Header::read(&file).unwrap();
    let volume_key = header.unlock(&file, &key).unwrap();
    header
        .add_key(&volume_key, &new, &NO_EFFORT)
        .unwrap()
        .changes
}

/// Returns the changes that remove the key "second" from "image".
fn removed(dir: &Dir) -> Vec<Change> {
    let file = dir.open("image");
    let header = Header::read(&file).unwrap();
    let (_, slot) = header.find(&file, &dir.key("second")).unwrap();
    header.remove_key(slot).unwrap()
}

/// Returns whether `key` opens "image". Fails if cryptsetup and this crate disagree.
fn opens(dir: &Dir, key: &str) -> bool {
    let passphrase = dir.key(key);
    let file = dir.open("image");
    let ours = Header::read(&file).and_then(|header| header.unlock(&file, &passphrase));
    if let Err(error) = &ours {
        assert!(matches!(error, Error::WrongKey), "{error}");
    }
    let theirs = dir.opens("image", key);
    assert_eq!(ours.is_ok(), theirs, "{key}: {ours:?}");
    theirs
}

#[test]
fn cryptsetup_opens_what_we_added_and_not_what_we_removed() {
    for version in [1, 2] {
        let dir = two_keys(version);
        assert!(opens(&dir, "key") && opens(&dir, "second"));
        let before = Header::read(&dir.open("image")).unwrap().fingerprint();
        apply(&dir.open("image"), &removed(&dir));
        assert!(opens(&dir, "key") && !opens(&dir, "second"));
        let after = Header::read(&dir.open("image")).unwrap().fingerprint();
        assert_eq!(before, after);
    }
}

#[test]
fn we_open_what_cryptsetup_added_and_not_what_it_killed() {
    for version in [1, 2] {
        let dir = two_keys(version);
        dir.key("third");
        let add = ["luksAddKey", "--batch-mode", "--key-file", "second"];
        dir.run(
            "cryptsetup",
            &[&add[..], &QUICK[..], &["image", "third"]].concat(),
        );
        assert!(opens(&dir, "third"));
        let kill = [
            "luksKillSlot",
            "--batch-mode",
            "--key-file",
            "third",
            "image",
        ];
        dir.run("cryptsetup", &[&kill[..], &["0"]].concat());
        assert!(!opens(&dir, "key") && opens(&dir, "second") && opens(&dir, "third"));
    }
}

/// Applies `changes` to an image, but interrupts change number `cut` after `torn` of its bytes.
fn cut(before: &[u8], changes: &[Change], cut: usize, torn: usize) -> Vec<u8> {
    let mut image = before.to_vec();
    for (number, change) in changes.iter().enumerate().take(cut + 1) {
        let whole = change.bytes.len();
        let len = if number == cut {
            torn.min(whole)
        } else {
            whole
        };
        let at = change.at as usize;
        image[at..at + len].copy_from_slice(&change.bytes[..len]);
    }
    image
}

/// Numbers of bytes after which a write is interrupted: none, some multiples of a sector, all.
const TORN: [usize; 4] = [0, 512, 4096 + 512, usize::MAX];

#[test]
fn a_cut_leaves_the_keys_from_before_or_after() {
    for version in [1, 2] {
        for adds in [false, true] {
            let dir = two_keys(version);
            let before = dir.read("image");
            let (changed, changes) = match adds {
                true => ("third", added(&dir, "third")),
                false => ("second", removed(&dir)),
            };
            let mut states = Vec::new();
            for number in 0..changes.len() {
                for torn in TORN {
                    // The disk does not tear a 4-byte number.
                    if changes[number].bytes.len() <= 4 && torn == 512 {
                        continue;
                    }
                    dir.write("image", &cut(&before, &changes, number, torn));
                    assert!(opens(&dir, "key"), "{version} {adds} {number} {torn}");
                    states.push(opens(&dir, changed));
                }
            }
            assert_eq!(states.first(), Some(&!adds));
            assert_eq!(states.last(), Some(&adds));
            assert!(states.windows(2).filter(|pair| pair[0] != pair[1]).count() == 1);
        }
    }
}

#[test]
fn a_cut_leaves_keys_also_where_one_copy_is_damaged() {
    for damaged in [0, 16384] {
        let dir = two_keys(2);
        let mut before = dir.read("image");
        before[damaged..damaged + 4096].fill(0);
        dir.write("image", &before);
        let changes = added(&dir, "third");
        for number in 0..changes.len() {
            for torn in TORN {
                dir.write("image", &cut(&before, &changes, number, torn));
                assert!(opens(&dir, "key"), "{damaged} {number} {torn}");
            }
        }
        assert!(opens(&dir, "third"));
    }
}

#[test]
fn what_is_removed_is_wiped() {
    for version in [1, 2] {
        let dir = two_keys(version);
        let header = Header::read(&dir.open("image")).unwrap();
        let at = header.describe().slots[1].material_offset as usize;
        let before = dir.read("image");
        apply(&dir.open("image"), &removed(&dir));
        let after = dir.read("image");
        let material = at..at + 256_000;
        let same = before[material.clone()].iter().zip(&after[material]);
        let same = same.filter(|(before, after)| before == after).count();
        assert!(same < 2000, "{same}");
    }
}

#[test]
fn the_last_key_stays() {
    for version in [1, 2] {
        let dir = Dir::new();
        dir.create("image", version);
        let file = dir.open("image");
        let header = Header::read(&file).unwrap();
        assert!(matches!(header.remove_key(0), Err(Error::LastKey(0))));
        assert!(matches!(header.remove_key(1), Err(Error::NoSuchSlot(1))));
    }
}

#[test]
fn slots_are_used_up_one_by_one() {
    for (version, most) in [(1, 8), (2, 32)] {
        let dir = Dir::new();
        let key = dir.create("image", version);
        let file = dir.open("image");
        let key = fathom_luks::VolumeKey::new(key).unwrap();
        for number in 1..most {
            let header = Header::read(&file).unwrap();
            let name = format!("key{number}");
            let new = dir.key(&name);
            let added = header.add_key(&key, &new, &NO_EFFORT).unwrap();
            assert_eq!(added.slot, number);
            apply(&file, &added.changes);
        }
        let header = Header::read(&file).unwrap();
        let full = header.add_key(&key, &dir.key("more"), &NO_EFFORT);
        assert!(matches!(full, Err(Error::NoFreeSlot)));
        assert!(dir.opens("image", "key1") && dir.opens("image", &format!("key{}", most - 1)));
    }
}

#[test]
fn the_volume_key_of_another_header_is_refused() {
    let dir = Dir::new();
    dir.create("image", 1);
    let other = fathom_luks::VolumeKey::new(dir.create("other", 1)).unwrap();
    let header = Header::read(&dir.open("image")).unwrap();
    let refused = header.add_key(&other, &dir.key("key"), &NO_EFFORT);
    assert!(matches!(refused, Err(Error::WrongVolumeKey)));
}
