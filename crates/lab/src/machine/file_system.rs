//! File systems of guests.

use crate::words::words;

words! {
    /// A file system that guests can have on a disk.
    pub enum FileSystem {
        Ext4 = "ext4",
        Ext3 = "ext3",
        Ext2 = "ext2",
        Xfs = "xfs",
        Btrfs = "btrfs",
    }
}

impl FileSystem {
    /// This machine's program that makes it.
    pub fn maker(self) -> &'static str {
        match self {
            FileSystem::Ext4 | FileSystem::Ext3 | FileSystem::Ext2 => "mke2fs",
            FileSystem::Xfs => "mkfs.xfs",
            FileSystem::Btrfs => "mkfs.btrfs",
        }
    }

    /// The guest's module, beyond those that every guest has; ext4's serves its predecessors.
    pub fn module(self) -> Option<&'static str> {
        match self {
            FileSystem::Ext4 | FileSystem::Ext3 | FileSystem::Ext2 => None,
            FileSystem::Xfs => Some("xfs"),
            FileSystem::Btrfs => Some("btrfs"),
        }
    }

    /// Its maker's options: it asks nothing, and gives none of the disk's blocks back. Where the
    /// inode tables of ext4 are left for later, its kernel would write them in the background.
    pub fn options(self, leaves_inodes: bool) -> String {
        let lazy = u8::from(leaves_inodes);
        match self {
            FileSystem::Ext4 | FileSystem::Ext3 | FileSystem::Ext2 => {
                format!("-q -F -t {self} -E nodiscard,lazy_itable_init={lazy},lazy_journal_init=0")
            }
            FileSystem::Xfs | FileSystem::Btrfs => "-q -f -K".to_owned(),
        }
    }

    /// Makes it, in a guest's shell.
    pub fn make(self, device: &str, leaves_inodes: bool) -> String {
        let maker = match self.maker() {
            "mke2fs" => "mkfs.ext4", // as guests call it
            other => other,
        };
        format!("/usr/bin/{maker} {} {device}", self.options(leaves_inodes))
    }
}
