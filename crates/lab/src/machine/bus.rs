//! Buses and device types by which a guest sees QEMU's disks.

use crate::words::words;

words! {
    /// The bus or device type by which a guest sees a disk.
    pub enum Bus {
        /// virtio-blk on PCI or, on microvm, on MMIO.
        VirtioBlk = "virtio-blk",
        /// A disk of a virtio-scsi controller.
        VirtioScsi = "virtio-scsi",
        /// The PIIX3's controller, which takes one request at a time.
        Ide = "ide",
        /// SATA: the ICH9's controller.
        Ahci = "ahci",
        /// A namespace of an NVMe controller.
        Nvme = "nvme",
    }
}

/// PCI address of the PIIX3's IDE controller, which is part of the machine.
pub(super) const IDE_ADDRESS: &str = "01.1";

/// A disk's identity and address on QEMU's command line.
pub(super) struct Place<'a> {
    pub id: &'a str,
    /// Slot on the PCI bus.
    pub slot: u8,
    /// `,bootindex=N`, or empty.
    pub order: &'a str,
    /// Additional properties of the device that has the queues, each with a comma before it.
    pub more: &'a str,
}

impl Bus {
    /// Returns whether the device is virtio, with an ioeventfd, event indices and packed rings.
    pub fn is_virtio(self) -> bool {
        matches!(self, Bus::VirtioBlk | Bus::VirtioScsi)
    }

    /// Returns whether a guest can have several queues to a disk.
    pub fn has_queues(self) -> bool {
        !matches!(self, Bus::Ide | Bus::Ahci)
    }

    /// Returns the additional kernel modules of the guest's drivers.
    pub fn modules(self) -> &'static [&'static str] {
        match self {
            Bus::VirtioBlk => &[],
            Bus::VirtioScsi => &["virtio_scsi", "sd_mod"],
            Bus::Ide => &["ata_piix", "sd_mod"],
            Bus::Ahci => &["ahci", "sd_mod"],
            Bus::Nvme => &["nvme"],
        }
    }

    /// Returns an additional word for the guest's kernel command line.
    pub fn kernel_word(self) -> Option<&'static str> {
        match self {
            // Otherwise the guest's disk is a multipath device without a scheduler.
            Bus::Nvme => Some("nvme_core.multipath=0"),
            _ => None,
        }
    }

    /// Returns QEMU's devices for a disk whose drive is `ID-file`: the one that has the queues, and
    /// the disk if that is a separate device.
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
