//! What a guest sees a disk of QEMU's on.

use crate::words::words;

words! {
    /// What a guest sees a disk on.
    pub enum Bus {
        VirtioBlk = "virtio-blk",
        VirtioScsi = "virtio-scsi",
        /// The PIIX3's, which takes one request at a time.
        Ide = "ide",
        /// SATA: the ICH9's.
        Ahci = "ahci",
        Nvme = "nvme",
    }
}

/// The PIIX3's IDE controller, which the machine has itself.
pub(super) const IDE_ADDRESS: &str = "01.1";

/// A disk's name and place on QEMU's command line.
pub(super) struct Place<'a> {
    pub id: &'a str,
    /// Of the PCI bus.
    pub slot: u8,
    /// `,bootindex=N`, or nothing.
    pub order: &'a str,
    /// More properties of the device that has the queues, each after a comma.
    pub more: &'a str,
}

impl Bus {
    /// Its devices are virtio's, with what these have: an ioeventfd, event indices, packed rings.
    pub fn is_virtio(self) -> bool {
        matches!(self, Bus::VirtioBlk | Bus::VirtioScsi)
    }

    /// A guest can have several queues to a disk.
    pub fn has_queues(self) -> bool {
        !matches!(self, Bus::Ide | Bus::Ahci)
    }

    /// The guest's drivers, as names of kernel modules, beyond those of every guest.
    pub fn modules(self) -> &'static [&'static str] {
        match self {
            Bus::VirtioBlk => &[],
            Bus::VirtioScsi => &["virtio_scsi", "sd_mod"],
            Bus::Ide => &["ata_piix", "sd_mod"],
            Bus::Ahci => &["ahci", "sd_mod"],
            Bus::Nvme => &["nvme"],
        }
    }

    /// A word for the guest's kernel.
    pub fn kernel_word(self) -> Option<&'static str> {
        match self {
            // Else the guest's disk is not the device itself but a path to it, without a scheduler.
            Bus::Nvme => Some("nvme_core.multipath=0"),
            _ => None,
        }
    }

    /// QEMU's devices for a disk whose drive is `ID-file`: the one that has queues, and the disk where
    /// that is another.
    pub(super) fn devices(self, place: &Place, queues: Option<u16>) -> (String, Option<String>) {
        let Place {
            id,
            slot,
            order,
            more,
        } = place;
        let count = |name: &str| queues.map_or(String::new(), |count| format!(",{name}={count}"));
        let controller = |driver: &str| format!("{driver},id={id}-bus,addr={slot:x}{more}");
        let whole =
            |driver: &str| format!("{driver},drive={id}-file,id={id},addr={slot:x}{order}{more}");
        let on =
            |driver: &str, bus: &str| format!("{driver},drive={id}-file,id={id},bus={bus}{order}");
        let own_bus = format!("{id}-bus.0");
        match self {
            Bus::VirtioBlk => (whole("virtio-blk-pci") + &count("num-queues"), None),
            Bus::VirtioScsi => (
                controller("virtio-scsi-pci") + &count("num_queues"),
                Some(on("scsi-hd", &own_bus)),
            ),
            Bus::Ide => (on("ide-hd", "ide.0"), None),
            Bus::Ahci => (controller("ich9-ahci"), Some(on("ide-hd", &own_bus))),
            Bus::Nvme => (
                whole("nvme") + &format!(",serial={id}") + &count("max_ioqpairs"),
                None,
            ),
        }
    }
}
