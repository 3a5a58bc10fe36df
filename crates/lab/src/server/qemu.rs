//! Disks that QEMU itself serves.

use super::{Kind, Spec};
use crate::error::{Error, Result};
use crate::host;
use crate::machine::{Bus, Disk, QemuDisk, Serving};

/// First QEMU versions with `iothread-vq-mapping`: for virtio-blk, and for virtio-scsi.
const MAPPED: (u32, u32) = (9, 0);
const MAPPED_SCSI: (u32, u32) = (10, 0);

pub(super) fn check(kind: &Kind, spec: &Spec) -> Result<()> {
    if *kind != Kind::QemuMain && !spec.bus.is_virtio() {
        let what = "QEMU serves a disk on it in its main loop: only with --disk qemu-main";
        return Err(Error::Protocol(format!("--bus {}: {what}", spec.bus)));
    }
    match (kind, spec.bus) {
        (Kind::QemuMapped, Bus::VirtioScsi) => host::need_qemu(MAPPED_SCSI),
        (Kind::QemuMapped, _) => host::need_qemu(MAPPED),
        _ => host::qemu_version().map(drop),
    }
}

pub(super) fn disk(kind: &Kind, spec: &Spec) -> Disk {
    let polling = (!spec.poll).then_some(0);
    let serving = match kind {
        Kind::QemuMain | Kind::QemuNoIoeventfd => Serving::Main,
        Kind::QemuMapped => Serving::Mapped {
            threads: spec.threads.unwrap_or(spec.queues),
            polling,
        },
        _ => Serving::Thread { polling },
    };
    let disk = QemuDisk {
        image: spec.image.to_owned(),
        format: spec.format,
        bus: spec.bus,
        aio: spec.aio,
        cache: spec.cache.to_owned(),
        read_only: false,
        serving,
        queues: spec.bus.has_queues().then_some(spec.queues),
    };
    let disk = Disk::qemu(spec.name, disk);
    match kind {
        Kind::QemuNoIoeventfd => disk.with_property("ioeventfd=off"),
        _ => disk,
    }
}
