//! What a machine is built on, and the firmware that starts it.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::error::Result;
use crate::host::{self, Accelerator};
use crate::tracers;
use crate::words::words;

words! {
    /// QEMU's type of machine.
    pub enum Board {
        /// The PC of 1996, with a PCI bus.
        Pc = "pc",
        /// The PC of 2009, with PCI Express.
        Q35 = "q35",
        /// No PCI, but for virtio's devices in memory: what starts fastest.
        Microvm = "microvm",
    }
}

words! {
    /// What runs before a kernel that QEMU has loaded.
    pub enum Firmware {
        SeaBios = "seabios",
        /// No drivers, no menus: it starts the kernel and nothing else.
        Qboot = "qboot",
        /// UEFI.
        Ovmf = "ovmf",
    }
}

const QBOOT: &[&str] = &["/usr/share/qemu/qboot.rom", "/usr/share/qemu-kvm/qboot.rom"];
/// With its variables in the same file: what a guest writes there is lost.
const OVMF: &[&str] = &["/usr/share/qemu/OVMF.fd", "/usr/share/ovmf/OVMF.fd"];

impl Board {
    /// For `-machine`, with the memory that the machine has.
    pub(super) fn option(self) -> &'static str {
        match self {
            Board::Pc => "pc,memory-backend=memory,usb=off,vmport=off,graphics=off",
            Board::Q35 => "q35,memory-backend=memory,usb=off,vmport=off,graphics=off",
            Board::Microvm => "microvm,memory-backend=memory,usb=off,graphics=off",
        }
    }

    /// A device as this machine has it, from what it is on a PCI bus.
    pub(super) fn device(self, on_pci: OsString) -> OsString {
        let text = match (self, on_pci.to_str()) {
            (Board::Microvm, Some(text)) => text,
            _ => return on_pci,
        };
        let mut properties = text.split(',').filter(|one| !one.starts_with("addr="));
        let driver = match properties.next() {
            Some("vhost-user-blk-pci") => "vhost-user-blk".to_owned(),
            Some(driver) => driver.replace("-pci", "-device"),
            None => String::new(),
        };
        let all = std::iter::once(driver.as_str()).chain(properties);
        all.collect::<Vec<_>>().join(",").into()
    }

    /// What the guest's kernel must load to see the machine's virtio devices, beyond what every guest
    /// does.
    pub(super) fn modules(self) -> &'static [&'static str] {
        match self {
            Board::Pc | Board::Q35 => &[],
            Board::Microvm => &["virtio_mmio"],
        }
    }

    /// What the guest's kernel has to be told.
    pub(super) fn kernel_word(self, accelerator: Accelerator) -> Option<String> {
        // There is no clock but the PIT, which an emulated kernel that is held up for a moment cannot
        // measure its TSC by; then it hangs. Its TSC is this machine's.
        (self == Board::Microvm && accelerator == Accelerator::Tcg)
            .then(|| format!("tsc_early_khz={}", tracers::tsc_khz()))
    }

    /// What firmware QEMU gives it if nobody asks.
    pub fn firmware(self) -> Firmware {
        match self {
            Board::Pc | Board::Q35 => Firmware::SeaBios,
            Board::Microvm => Firmware::Qboot,
        }
    }
}

impl Firmware {
    /// The file, for `-bios`. `None`: it comes with QEMU, under a name that each machine knows.
    ///
    /// # Errors
    /// When it is not installed.
    pub fn file(self) -> Result<Option<PathBuf>> {
        match self {
            Firmware::SeaBios => Ok(None),
            Firmware::Qboot => {
                host::first_file("qboot (package qemu-system-data)", QBOOT).map(Some)
            }
            Firmware::Ovmf => host::first_file("OVMF firmware", OVMF).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_a_microvm_have_no_place_on_a_bus() {
        for (on_pci, without) in [
            (
                "virtio-blk-pci,drive=d,id=d,addr=4,num-queues=1",
                "virtio-blk-device,drive=d,id=d,num-queues=1",
            ),
            (
                "vhost-user-blk-pci,chardev=c,addr=4",
                "vhost-user-blk,chardev=c",
            ),
            (
                "virtserialport,chardev=a,name=b",
                "virtserialport,chardev=a,name=b",
            ),
        ] {
            assert_eq!(Board::Microvm.device(on_pci.into()), without);
            assert_eq!(Board::Q35.device(on_pci.into()), on_pci);
        }
    }
}
