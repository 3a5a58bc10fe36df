//! The parameters of the experiment: the factors, then the load.

use crate::experiment::shared::{self, count};
use crate::experiment::{Kind, Parameter};
use crate::host::Accelerator;
use crate::machine::{Bus, FileSystem, Format};
use crate::server;
use crate::words::words;
use crate::work::Engine;

words! {
    /// QEMU's cache modes.
    pub enum Cache {
        None = "none",
        Writeback = "writeback",
        Writethrough = "writethrough",
        Directsync = "directsync",
        Unsafe = "unsafe",
    }
}

impl Cache {
    /// Past the host's page cache.
    pub fn is_direct(self) -> bool {
        matches!(self, Cache::None | Cache::Directsync)
    }
}

words! {
    /// What the server opens.
    pub enum Storage {
        File = "file",
        /// A loop device over the file: a block device.
        Loop = "loop",
    }
}

words! {
    /// Who orders a block device's requests.
    pub enum Scheduler {
        None = "none",
        MqDeadline = "mq-deadline",
        Kyber = "kyber",
        Bfq = "bfq",
    }
}

/// Nothing on the disk: the load is on the device itself.
pub(super) const RAW: &str = "raw";

const FILE_SYSTEM: Kind = Kind::Word {
    form: "raw, ext4, ext3, ext2, xfs, btrfs",
    check: |text| match text {
        RAW => Ok(()),
        _ => { text.parse::<FileSystem>().map(drop) }.map_err(|error| format!("{error}, {RAW}")),
    },
};

const SERVERS: &str = "qemu-main, qemu, qemu-mapped, fathom, qsd";

pub(super) const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        "bus",
        "What the guest sees the disk on; all but virtio-blk with QEMU as the server",
        Kind::of::<Bus>(Bus::FORM),
        "virtio-blk",
    ),
    Parameter::new(
        "disk",
        "Who serves the disk",
        Kind::of::<server::Kind>(SERVERS),
        "qemu-main",
    ),
    shared::aio("io_uring"),
    Parameter::new(
        "cache",
        "The server's cache mode",
        Kind::of::<Cache>(Cache::FORM),
        "none",
    ),
    Parameter::new(
        "format",
        "The image's format",
        Kind::of::<Format>(Format::FORM),
        "raw",
    ),
    Parameter::new(
        "storage",
        "Whether the server opens the image's file, or a loop device over it",
        Kind::of::<Storage>(Storage::FORM),
        "file",
    ),
    Parameter::new(
        "host-scheduler",
        "Scheduler of the loop device or of the one below the file; put back afterwards",
        Kind::of::<Scheduler>(Scheduler::FORM),
        "",
    ),
    Parameter::new(
        "guest-scheduler",
        "Scheduler of the disk in the guest",
        Kind::of::<Scheduler>(Scheduler::FORM),
        "none",
    ),
    Parameter::new(
        "fs",
        "File system in the guest; raw: the load is on the device",
        FILE_SYSTEM,
        RAW,
    ),
    Parameter::new(
        "barriers",
        "The guest's file system flushes the disk's cache (ext4 and btrfs can do without)",
        Kind::Switch,
        "on",
    ),
    Parameter::new(
        "x2apic",
        "The guest's CPU has an x2APIC",
        Kind::Switch,
        "on",
    ),
    Parameter::new(
        "ioeventfd",
        "Kicks are taken by an eventfd and not by the vCPU's thread (off with qemu-main)",
        Kind::Switch,
        "on",
    ),
    Parameter::new(
        "iothreads",
        "I/O threads of fathom or qemu-mapped; empty: as many as they have by themselves",
        count(64),
        "",
    ),
    Parameter::new(
        "queues",
        "Request queues of the disk, at most --cpus",
        count(64),
        "1",
    ),
    Parameter::new(
        "event-idx",
        "virtio's event indices, which save kicks and interrupts",
        Kind::Switch,
        "on",
    ),
    Parameter::new(
        "packed",
        "virtio's packed ring (QEMU's own disks)",
        Kind::Switch,
        "off",
    ),
    Parameter::new(
        "huge-pages",
        "The guest's memory is in huge pages",
        Kind::Switch,
        "off",
    ),
    Parameter::new(
        "accelerator",
        "How QEMU runs the guest; empty: the best that this machine has",
        Kind::of::<Accelerator>(Accelerator::FORM),
        "",
    ),
    Parameter::new("cpus", "The guest's CPUs", count(255), "1"),
    shared::RW,
    shared::block_size("4k"),
    shared::THREADS,
    shared::DEPTH,
    Parameter::new(
        "ioengine",
        "How several are kept in flight; with --iodepth 1 it is by calls",
        Kind::of::<Engine>(Engine::FORM),
        "libaio",
    ),
    Parameter::new("direct", "Past the guest's page cache", Kind::Switch, "on"),
    Parameter::new(
        "fsync",
        "Flush after so many writes; 0: never",
        Kind::Count {
            least: 0,
            most: 1 << 20,
        },
        "0",
    ),
    shared::RUNTIME,
    Parameter::new(
        "size",
        "Size of the image that is made for each cell; a file in the guest has half of it",
        Kind::Size {
            least: 1 << 20,
            most: 1 << 40,
        },
        "1G",
    ),
    Parameter::new(
        "image",
        "Use this image instead of making one: a file, a block device, or nbd+unix:///?socket=PATH",
        Kind::Text,
        "",
    ),
    Parameter::new(
        "overwrite",
        "Destroy what is in the image that --image names",
        Kind::Switch,
        "off",
    )
    .rarely(),
    Parameter::new(
        "full",
        "Run all combinations of values, not one factor at a time",
        Kind::Switch,
        "off",
    ),
];
