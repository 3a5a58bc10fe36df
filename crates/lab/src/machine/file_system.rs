//! File systems that guests use.

use crate::words::words;

words! {
    /// A file system that guests can have on a disk.
    pub enum FileSystem {
        /// ext4, whose module every guest loads.
        Ext4 = "ext4",
        /// ext3, which the module of ext4 handles.
        Ext3 = "ext3",
        /// ext2, which the module of ext4 handles.
        Ext2 = "ext2",
        /// XFS, for which guests load a module.
        Xfs = "xfs",
        /// Btrfs, for which guests load a module.
        Btrfs = "btrfs",
    }
}

impl FileSystem {
    /// Returns the program on this machine that creates the file system.
    pub fn maker(self) -> &'static str {
        match self {
            FileSystem::Ext4 | FileSystem::Ext3 | FileSystem::Ext2 => "mke2fs",
            FileSystem::Xfs => "mkfs.xfs",
            FileSystem::Btrfs => "mkfs.btrfs",
        }
    }

    /// Returns the additional module of the guest's kernel. The ext4 module also handles ext3 and
    /// ext2.
    pub fn module(self) -> Option<&'static str> {
        match self {
            FileSystem::Ext4 | FileSystem::Ext3 | FileSystem::Ext2 => None,
            FileSystem::Xfs => Some("xfs"),
            FileSystem::Btrfs => Some("btrfs"),
        }
    }

    /// Returns the options of the program that creates the file system. With these options, the
    /// program asks no questions and discards no blocks. If `leaves_inodes`, ext4's inode tables
    /// stay uninitialised, and the guest's kernel writes them in the background.
    pub fn options(self, leaves_inodes: bool) -> String {
        let lazy = u8::from(leaves_inodes);
        match self {
            FileSystem::Ext4 | FileSystem::Ext3 | FileSystem::Ext2 => {
                format!("-q -F -t {self} -E nodiscard,lazy_itable_init={lazy},lazy_journal_init=0")
            }
            FileSystem::Xfs | FileSystem::Btrfs => "-q -f -K".to_owned(),
        }
    }

    /// Returns the command for a guest's shell that creates the file system.
    pub fn make(self, device: &str, leaves_inodes: bool) -> String {
        let maker = match self.maker() {
            "mke2fs" => "mkfs.ext4", // as guests call it
            other => other,
        };
        format!("/usr/bin/{maker} {} {device}", self.options(leaves_inodes))
    }
}
