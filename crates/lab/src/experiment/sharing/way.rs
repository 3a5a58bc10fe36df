//! Ways in which a guest accesses the files.

use crate::bed::Protocol;
use crate::server;
use crate::words::words;

words! {
    /// How the files are accessed.
    pub enum Way {
        /// A disk served by QEMU, with a file system of the guest.
        VirtioBlk = "virtio-blk",
        /// A disk served by Fathom, with a file system of the guest.
        VhostUserBlk = "vhost-user-blk",
        /// A directory served by virtiofsd. The guest validates its page cache again after a
        /// second, and when a file is opened.
        Virtiofs = "virtiofs",
        /// A directory served by virtiofsd. The guest's cache is always valid, and has write-back.
        VirtiofsAlways = "virtiofs-always",
        /// A directory served by virtiofsd, without a cache in the guest.
        VirtiofsNever = "virtiofs-never",
        /// A directory served by QEMU, without a cache in the guest.
        NineP = "9p",
        /// A directory served by QEMU. The guest's cache is always valid, and has write-back.
        NinePLoose = "9p-loose",
        /// A directory of this machine, without a guest.
        Bare = "bare",
    }
}

/// Components of a way.
pub enum Reach {
    /// A disk and its server.
    Disk(server::Kind),
    Virtiofs(&'static [&'static str]),
    /// 9p, with this value of the guest's mount option `cache`.
    NineP(&'static str),
    Host,
}

impl Way {
    pub fn reach(self) -> Reach {
        match self {
            Way::VirtioBlk => Reach::Disk(server::Kind::Qemu),
            Way::VhostUserBlk => Reach::Disk(server::Kind::Fathom),
            Way::Virtiofs => Reach::Virtiofs(&["--allow-direct-io", "--cache=auto"]),
            Way::VirtiofsAlways => {
                Reach::Virtiofs(&["--allow-direct-io", "--cache=always", "--writeback"])
            }
            Way::VirtiofsNever => Reach::Virtiofs(&["--allow-direct-io", "--cache=never"]),
            Way::NineP => Reach::NineP("none"),
            Way::NinePLoose => Reach::NineP("loose"),
            Way::Bare => Reach::Host,
        }
    }

    pub fn is_disk(self) -> bool {
        matches!(self.reach(), Reach::Disk(_))
    }

    /// Returns the guest's modules, in addition to those of every guest and of the disk's file
    /// system.
    pub fn modules(self) -> &'static [&'static str] {
        match self.reach() {
            Reach::Disk(_) | Reach::Host => &[],
            Reach::Virtiofs(arguments) => Protocol::Virtiofs { arguments }.modules(),
            Reach::NineP(mount) => Protocol::NineP { mount }.modules(),
        }
    }
}
