//! Parameters of the experiment: the factors, then the load.

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
    /// Whether the mode bypasses the host's page cache.
    pub fn is_direct(self) -> bool {
        matches!(self, Cache::None | Cache::Directsync)
    }
}

words! {
    /// The object that the server opens.
    pub enum Storage {
        File = "file",
        /// A loop device over the file, which is a block device.
        Loop = "loop",
    }
}

words! {
    /// The scheduler of a block device's requests.
    pub enum Scheduler {
        None = "none",
        MqDeadline = "mq-deadline",
        Kyber = "kyber",
        Bfq = "bfq",
    }
}

/// Value of `fs` without a file system: the load uses the device itself.
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
        "Bus of the disk; virtio-blk for servers other than QEMU",
        Kind::of::<Bus>(Bus::FORM),
        "virtio-blk",
    ),
    Parameter::new(
        "disk",
        "Server of the disk",
        Kind::of::<server::Kind>(SERVERS),
        "qemu-main",
    ),
    shared::aio("io_uring"),
    Parameter::new(
        "cache",
        "Cache mode of the server",
        Kind::of::<Cache>(Cache::FORM),
        "none",
    ),
    Parameter::new(
        "format",
        "Format of the image",
        Kind::of::<Format>(Format::FORM),
        "raw",
    ),
    Parameter::new(
        "storage",
        "Object that the server opens: the image file, or a loop device",
        Kind::of::<Storage>(Storage::FORM),
        "file",
    ),
    Parameter::new(
        "host-scheduler",
        "Scheduler of the host's block device; restored at the end",
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
        "File system in the guest; raw: none, the load uses the device",
        FILE_SYSTEM,
        RAW,
    ),
    Parameter::new(
        "barriers",
        "Whether the file system flushes the disk's cache",
        Kind::Switch,
        "on",
    ),
    Parameter::new(
        "x2apic",
        "Whether the guest's CPU has an x2APIC",
        Kind::Switch,
        "on",
    ),
    Parameter::new(
        "ioeventfd",
        "Whether kicks use an eventfd (off: only qemu-main)",
        Kind::Switch,
        "on",
    ),
    Parameter::new(
        "iothreads",
        "Number of I/O threads (fathom, qemu-mapped)",
        count(64),
        "",
    ),
    Parameter::new(
        "queues",
        "Number of queues of the disk, at most --cpus",
        count(64),
        "1",
    ),
    Parameter::new(
        "event-idx",
        "Whether virtio uses event indices, to save interrupts",
        Kind::Switch,
        "on",
    ),
    Parameter::new(
        "packed",
        "Whether virtio uses packed rings (not with qsd)",
        Kind::Switch,
        "off",
    ),
    Parameter::new(
        "huge-pages",
        "Whether the guest's memory is in huge pages",
        Kind::Switch,
        "off",
    ),
    Parameter::new(
        "accelerator",
        "Accelerator of the guest [default: the fastest here]",
        Kind::of::<Accelerator>(Accelerator::FORM),
        "",
    ),
    Parameter::new("cpus", "Number of CPUs of the guest", count(255), "1"),
    shared::RW,
    shared::block_size("4k"),
    shared::THREADS,
    shared::DEPTH,
    Parameter::new(
        "ioengine",
        "I/O engine of fio for several requests in flight; --iodepth 1 uses system calls",
        Kind::of::<Engine>(Engine::FORM),
        "libaio",
    ),
    Parameter::new(
        "direct",
        "Whether requests bypass the guest's page cache",
        Kind::Switch,
        "on",
    ),
    Parameter::new(
        "fsync",
        "Number of writes after which to flush; 0: never",
        Kind::Count {
            least: 0,
            most: 1 << 20,
        },
        "0",
    ),
    shared::RUNTIME,
    Parameter::new(
        "size",
        "Size of each cell's image; with --fs, the file has half",
        Kind::Size {
            least: 1 << 20,
            most: 1 << 40,
        },
        "1G",
    ),
    Parameter::new(
        "image",
        "File, device or NBD URI to use [default: a new image]",
        Kind::Text,
        "",
    ),
    Parameter::new(
        "overwrite",
        "Allow overwriting the data in --image",
        Kind::Switch,
        "off",
    )
    .rarely(),
    Parameter::new(
        "full",
        "Whether to run all combinations of values",
        Kind::Switch,
        "off",
    ),
];
