//! QEMU's own virtio-blk.

use super::{Kind, Spec};
use crate::error::Result;
use crate::host;
use crate::machine::{Disk, QemuDisk, Serving};

/// The first with `iothread-vq-mapping`.
const MAPPED: (u32, u32) = (9, 0);

pub(super) fn check() -> Result<()> {
    host::qemu_version().map(drop)
}

pub(super) fn check_mapped() -> Result<()> {
    host::need_qemu(MAPPED)
}

pub(super) fn disk(kind: &Kind, spec: &Spec) -> Disk {
    let polling = (!spec.poll).then_some(0);
    let serving = match kind {
        Kind::QemuMain | Kind::QemuNoIoeventfd => Serving::Main,
        Kind::QemuMapped => Serving::Mapped {
            threads: spec.queues,
            polling,
        },
        _ => Serving::Thread { polling },
    };
    let disk = QemuDisk {
        image: spec.image.to_owned(),
        aio: spec.aio,
        cache: spec.cache.to_owned(),
        read_only: false,
        serving,
        queues: Some(spec.queues),
    };
    let disk = Disk::qemu(spec.name, disk);
    match kind {
        Kind::QemuNoIoeventfd => disk.with_property("ioeventfd=off"),
        _ => disk,
    }
}
