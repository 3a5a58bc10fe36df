//! Identities of image files and block devices that survive restarts of processes and of the host.

use crate::gate::{self, Wanted};
use rustix::fs::{major, minor};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Prefix of an identity that is valid only until the host restarts.
const THIS_BOOT: &str = "boot";

/// Placeholder for an unknown identity.
pub const UNKNOWN: &str = "device";

/// Maximum depth to which loop devices on files on loop devices are followed.
const MAX_NESTED: usize = 4;

/// Result of the comparison of two identities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sameness {
    /// Both identities belong to the same file or device.
    Same,
    /// The identities belong to different files or devices.
    Different,
    /// The identities prove neither.
    Unknown,
}

/// Returns the identity of a file or block device, by which [`compare`] recognizes it later.
///
/// A file is identified by its inode number and birth time. A file without a birth time is
/// identified by its handle, which includes a generation number of the inode. A device is
/// identified by the identifier from its driver, hardware or partition table. A device without an
/// identifier is identified by the kernel's sequence number, which is valid until the host
/// restarts.
///
/// Returns `None` if nothing distinguishes the file from others.
pub fn lasting_id(file: &File) -> io::Result<Option<String>> {
    let metadata = file.metadata()?;
    Ok(match metadata.file_type().is_block_device() {
        true => device_id(metadata.rdev(), MAX_NESTED),
        false => file_id(&metadata, Some(file)),
    })
}

/// Returns the identity of the file at `path`, like [`lasting_id`].
pub fn lasting_id_at(path: &Path) -> io::Result<Option<String>> {
    match gate::other() {
        None => lasting_id(&gate::place(path)?),
        // A process behind a gate cannot read sysfs, so the gate returns the identity.
        Some(gate) => {
            let path = path.to_owned();
            let got = gate.get(&Wanted::Place { path }, None)?;
            Ok(got.path.map(|id| id.to_string_lossy().into_owned()))
        }
    }
}

/// Compares two identities that [`lasting_id`] returned.
pub fn compare(one: &str, other: &str) -> Sameness {
    let parts = |id: &str| -> Vec<String> { id.split(':').map(str::to_owned).collect() };
    let (a, b) = (parts(one), parts(other));
    let (Some(kind), Some(other_kind)) = (a.first(), b.first()) else {
        return Sameness::Unknown;
    };
    let is_vague = |id: &[String]| {
        // Earlier versions returned these for every device, and for files without a birth time.
        id == [UNKNOWN] || id.len() == 2 && id[1] == "0" && id[0] != "handle"
    };
    if is_vague(&a) || is_vague(&b) {
        // Different inode numbers belong to different files.
        let is_inode = |kind: &str| kind.parse::<u64>().is_ok();
        let differ = is_inode(kind) && is_inode(other_kind) && kind != other_kind;
        return if differ {
            Sameness::Different
        } else {
            Sameness::Unknown
        };
    }
    let is_of_other_boot = kind == THIS_BOOT && other_kind == THIS_BOOT && a.get(1) != b.get(1);
    match one == other {
        true => Sameness::Same,
        false if is_of_other_boot => Sameness::Unknown,
        // The device may have received an identifier since, or its backing file now has one.
        false if (kind == THIS_BOOT) != (other_kind == THIS_BOOT) => Sameness::Unknown,
        false => Sameness::Different,
    }
}

fn file_id(metadata: &Metadata, file: Option<&File>) -> Option<String> {
    let born = metadata.created().ok();
    let born = born.and_then(|born| born.duration_since(UNIX_EPOCH).ok());
    match born.filter(|born| !born.is_zero()) {
        Some(born) => Some(format!("{}:{}", metadata.ino(), born.as_nanos())),
        None => handle_of(file?),
    }
}

/// Returns the file's handle for network file servers, which no other file ever has.
fn handle_of(file: &File) -> Option<String> {
    const ROOM: usize = 128;
    /// `struct file_handle` of name_to_handle_at(2).
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        handle: [u8; ROOM],
    }
    let mut handle = Handle {
        bytes: ROOM as u32,
        kind: 0,
        handle: [0; ROOM],
    };
    let mut mount = 0i32;
    // SAFETY: the kernel writes at most `ROOM` bytes of handle, and one int; the path is an empty,
    // NUL-terminated string.
    let got = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            c"".as_ptr(),
            &raw mut handle,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    let len = usize::try_from(handle.bytes).ok().filter(|_| got == 0)?;
    let bytes: String = { handle.handle.get(..len)?.iter() }
        .map(|byte| format!("{byte:02x}"))
        .collect();
    Some(format!("handle:{}:{bytes}", handle.kind))
}

fn device_id(number: u64, depth: usize) -> Option<String> {
    let directory = format!("/sys/dev/block/{}:{}", major(number), minor(number));
    let directory = fs::canonicalize(directory).ok()?;
    id_in(&directory, depth).or_else(|| {
        let boot = attribute(Path::new("/proc/sys/kernel/random"), "boot_id")?;
        let sequence = attribute(&directory, "diskseq")?;
        Some(format!("{THIS_BOOT}:{boot}:{sequence}"))
    })
}

/// Returns the identity of the device with this sysfs directory.
fn id_in(directory: &Path, depth: usize) -> Option<String> {
    if let Some(start) = attribute(directory, "partition").and(attribute(directory, "start")) {
        let disk = id_in(directory.parent()?, depth)?;
        return Some(format!("{disk}:from:{start}"));
    }
    if let Some(file) = attribute(directory, "loop/backing_file") {
        let place = fs::metadata(PathBuf::from(file)).ok();
        let below = place.filter(|_| depth > 0)?;
        let below = match below.file_type().is_block_device() {
            true => device_id(below.rdev(), depth - 1),
            false => file_id(&below, None),
        };
        let offset = attribute(directory, "loop/offset")?;
        // If the device below has no identifier, this device has none either.
        let below = below.filter(|below| !below.starts_with(THIS_BOOT))?;
        return Some(format!("loop:{below}:{offset}"));
    }
    let names = [
        "dm/uuid",
        "md/uuid",
        "wwid",
        "device/wwid",
        "uuid",
        "serial",
    ];
    let found = names
        .iter()
        .find_map(|name| Some((name, attribute(directory, name)?)));
    found.map(|(name, value)| format!("{name}:{value}"))
}

/// Reads a sysfs attribute without surrounding white space. Returns `None` if the attribute is
/// missing or empty.
fn attribute(directory: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(directory.join(name)).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_recognized_and_its_successor_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("i");
        let id = || lasting_id(&File::open(&path).unwrap()).unwrap().unwrap();
        fs::write(&path, "x").unwrap();
        let first = id();
        assert_eq!(compare(&first, &id()), Sameness::Same);
        let handle = || handle_of(&File::open(&path).unwrap());
        let by_handle = handle();
        fs::rename(&path, dir.path().join("aside")).unwrap();
        fs::write(&path, "x").unwrap();
        assert_eq!(compare(&first, &id()), Sameness::Different);
        if let Some((then, now)) = by_handle.zip(handle()) {
            assert_eq!(compare(&then, &now), Sameness::Different);
            assert_eq!(compare(&now, &now), Sameness::Same);
        }
    }

    #[test]
    fn identities_that_prove_nothing_are_unknown() {
        use Sameness::{Different, Same, Unknown};
        for (one, other, expected) in [
            ("device", "device", Unknown),
            ("device", "dm/uuid:LVM-x", Unknown),
            ("12:0", "12:0", Unknown),
            ("12:0", "13:0", Different),
            ("12:0", "12:77", Unknown),
            ("12:77", "12:77", Same),
            ("12:77", "12:78", Different),
            ("12:77", "dm/uuid:x", Different),
            ("boot:a:3", "boot:a:3", Same),
            ("boot:a:3", "boot:a:4", Different),
            ("boot:a:3", "boot:b:3", Unknown),
            ("boot:a:3", "wwid:x", Unknown),
            ("wwid:x", "wwid:x", Same),
            ("wwid:x:from:2048", "wwid:x:from:4096", Different),
            ("loop:12:77:0", "loop:12:77:512", Different),
            ("handle:1:00ff", "handle:1:00fe", Different),
        ] {
            assert_eq!(compare(one, other), expected, "{one} {other}");
            assert_eq!(compare(other, one), expected, "{one} {other}");
        }
    }
}
