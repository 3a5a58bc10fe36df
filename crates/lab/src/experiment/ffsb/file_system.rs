//! The guest's file system.

use std::str::FromStr;

/// A kind of file system that guests can make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    Ext4,
    Xfs,
    Btrfs,
}

impl FileSystem {
    const ALL: [FileSystem; 3] = [FileSystem::Ext4, FileSystem::Xfs, FileSystem::Btrfs];
    /// How they are said.
    pub const FORM: &str = "ext4, xfs, btrfs";

    /// As mount(8) and the kernel's module have it.
    pub fn name(self) -> &'static str {
        match self {
            FileSystem::Ext4 => "ext4",
            FileSystem::Xfs => "xfs",
            FileSystem::Btrfs => "btrfs",
        }
    }

    /// This machine's program that makes it.
    pub fn maker(self) -> &'static str {
        match self {
            FileSystem::Ext4 => "mke2fs",
            FileSystem::Xfs => "mkfs.xfs",
            FileSystem::Btrfs => "mkfs.btrfs",
        }
    }

    /// A script that trims a device, makes the file system anew, and mounts it. Nothing of it goes
    /// on in the background afterwards.
    pub fn mount(self, device: &str, place: &str) -> String {
        let (make, options) = match self {
            FileSystem::Ext4 => (
                "mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=1",
                "noinit_itable",
            ),
            FileSystem::Xfs => ("mkfs.xfs -q -f -K", "rw"),
            FileSystem::Btrfs => ("mkfs.btrfs -q -f -K", "rw"),
        };
        format!(
            "/usr/bin/blkdiscard {device} || true\n/usr/bin/{make} {device}\n\
             mount -t {} -o {options} {device} {place}\n",
            self.name()
        )
    }
}

impl FromStr for FileSystem {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<FileSystem, String> {
        let found = FileSystem::ALL.into_iter().find(|one| one.name() == text);
        found.ok_or_else(|| format!("'{text}' is none of {}", FileSystem::FORM))
    }
}
