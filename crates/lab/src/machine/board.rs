//! QEMU's machine types, and the firmware that starts a machine.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::error::Result;
use crate::host::{self, Accelerator};
use crate::tracers;
use crate::words::words;

words! {
    /// QEMU's machine type.
    pub enum Board {
        /// The i440FX PC of 1996, with a PCI bus.
        Pc = "pc",
        /// The Q35 PC of 2009, with PCI Express.
        Q35 = "q35",
        /// No PCI; virtio devices use MMIO. This board starts the fastest.
        Microvm = "microvm",
    }
}

words! {
    /// Firmware that runs before a kernel that QEMU has loaded.
    pub enum Firmware {
        /// SeaBIOS, the BIOS of QEMU's PCs, with drivers for their disks.
        SeaBios = "seabios",
        /// Without drivers and menus: it only starts the kernel.
        Qboot = "qboot",
        /// UEFI.
        Ovmf = "ovmf",
    }
}

const QBOOT: &[&str] = &["/usr/share/qemu/qboot.rom", "/usr/share/qemu-kvm/qboot.rom"];
/// Images with the variables in the same file: what a guest writes to them is lost.
const OVMF: &[&str] = &["/usr/share/qemu/OVMF.fd", "/usr/share/ovmf/OVMF.fd"];

impl Board {
    /// Returns the value of `-machine`, which includes the machine's memory backend.
    pub(super) fn option(self) -> &'static str {
        match self {
            Board::Pc => "pc,memory-backend=memory,usb=off,vmport=off,graphics=off",
            Board::Q35 => "q35,memory-backend=memory,usb=off,vmport=off,graphics=off",
            Board::Microvm => "microvm,memory-backend=memory,usb=off,graphics=off",
        }
    }

    /// Converts the options of a PCI device to those of the machine's kind of device.
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

    /// Returns the additional modules that the guest's kernel needs for the machine's virtio
    /// devices.
    pub(super) fn modules(self) -> &'static [&'static str] {
        match self {
            Board::Pc | Board::Q35 => &[],
            Board::Microvm => &["virtio_mmio"],
        }
    }

    /// Returns an additional word for the guest's kernel command line.
    pub(super) fn kernel_word(self, accelerator: Accelerator) -> Option<String> {
        // The only clock is the PIT. An emulated kernel that is delayed for a moment cannot
        // calibrate its TSC with it, and hangs. The guest's TSC has the host's frequency.
        (self == Board::Microvm && accelerator == Accelerator::Tcg)
            .then(|| format!("tsc_early_khz={}", tracers::tsc_khz()))
    }

    /// Returns QEMU's default firmware of the machine.
    pub fn firmware(self) -> Firmware {
        match self {
            Board::Pc | Board::Q35 => Firmware::SeaBios,
            Board::Microvm => Firmware::Qboot,
        }
    }
}

impl Firmware {
    /// Returns the file for `-bios`. Returns `None` if QEMU includes the firmware under a name that
    /// each machine knows.
    ///
    /// # Errors
    /// When the firmware is not installed.
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
