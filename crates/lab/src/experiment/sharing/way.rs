//! How a guest gets to the files.

use crate::bed::Protocol;
use crate::server;
use crate::words::words;

words! {
    /// How the files are reached.
    pub enum Way {
        /// A disk of QEMU's, with a file system of the guest's.
        VirtioBlk = "virtio-blk",
        /// The same disk, served by Fathom.
        VhostUserBlk = "vhost-user-blk",
        /// A directory, by virtiofsd: what the guest has in its page cache is asked for again after a
        /// second, or when a file is opened.
        Virtiofs = "virtiofs",
        /// The same; the guest believes its cache for good, and keeps writes in it.
        VirtiofsAlways = "virtiofs-always",
        /// The same, without a cache in the guest.
        VirtiofsNever = "virtiofs-never",
        /// A directory, by QEMU, without a cache in the guest.
        NineP = "9p",
        /// The same; the guest believes its cache for good, and keeps writes in it.
        NinePLoose = "9p-loose",
        /// No guest: a directory of this machine.
        Bare = "bare",
    }
}

/// What a way is made of.
pub enum Reach {
    /// A disk, and who serves it.
    Disk(server::Kind),
    Virtiofs(&'static [&'static str]),
    /// With the guest's `cache=`.
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

    /// The guest's modules, beyond those of every guest and those of the disk's file system.
    pub fn modules(self) -> &'static [&'static str] {
        match self.reach() {
            Reach::Disk(_) | Reach::Host => &[],
            Reach::Virtiofs(arguments) => Protocol::Virtiofs { arguments }.modules(),
            Reach::NineP(mount) => Protocol::NineP { mount }.modules(),
        }
    }
}
