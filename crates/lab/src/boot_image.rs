//! Builds a raw disk image that a BIOS and UEFI firmware can both boot. The image has a boot sector
//! for the BIOS, and an EFI system partition with systemd-boot and the lab's Linux guest for UEFI.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::{Context, Error, Result};
use crate::host;
use crate::initramfs;
use crate::kernel::Kernel;
use crate::machine::Machine;
use crate::partitions::{self, EFI_SYSTEM, Partition, SECTOR};
use crate::scratch::Scratch;

const BOOT_SECTOR: &str = include_str!("guest/boot.S");
/// Maximum size of the boot code in bytes: the partition table's disk signature follows it.
const BOOT_CODE_MAX: usize = 440;
const ESP_START: u64 = 2048;
const ESP_SECTORS: u64 = 96 * 2048;
const IMAGE_BYTES: u64 = (ESP_START + ESP_SECTORS) * SECTOR;

const LOADERS: &[&str] = &[
    "/usr/lib/systemd/boot/efi/systemd-bootx64.efi",
    "/lib/systemd/boot/efi/systemd-bootx64.efi",
];

/// Writes the image to `path`. Under a BIOS, the image prints `line` on the serial console. Under
/// UEFI, it boots the lab's guest for `machine`.
///
/// # Errors
/// When a program, the boot loader or the kernel is missing, or `line` is longer than a sector.
pub fn make(path: &Path, line: &str, machine: &Machine) -> Result<()> {
    let scratch = Scratch::small()?;
    let what = || format!("cannot write {}", path.display());
    let image = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .context(what)?;
    image.set_len(IMAGE_BYTES).context(what)?;
    image
        .write_all_at(&boot_sector(scratch.path())?, 0)
        .context(what)?;
    let text = format!("{line}\r\n\0");
    if text.len() as u64 > SECTOR {
        return Err(Error::Protocol(
            "the boot sector's line is longer than a sector".into(),
        ));
    }
    image.write_all_at(text.as_bytes(), SECTOR).context(what)?;
    fill_esp(path, scratch.path(), machine)?;
    image.sync_all().context(what)
}

fn boot_sector(scratch: &Path) -> Result<Vec<u8>> {
    let file = |name: &str| scratch.join(name).to_string_lossy().into_owned();
    let (source, object, binary) = (file("boot.S"), file("boot.o"), file("boot.bin"));
    write(&source, BOOT_SECTOR.as_bytes())?;
    host::run("as", &["--32", "-o", &object, &source])?;
    let flags = [
        "-m",
        "elf_i386",
        "-Ttext",
        "0x7c00",
        "--oformat",
        "binary",
        "-o",
    ];
    host::run("ld", &[&flags[..], &[&binary, &object]].concat())?;
    let mut sector = fs::read(&binary).context(|| "cannot read the boot code".into())?;
    if sector.len() > BOOT_CODE_MAX {
        return Err(Error::Protocol("the boot code does not fit".into()));
    }
    sector.resize(partitions::TABLE, 0);
    let esp = Partition {
        kind: EFI_SYSTEM,
        first: ESP_START,
        sectors: ESP_SECTORS,
    };
    sector.extend_from_slice(&partitions::table(&[esp])?);
    Ok(sector)
}

fn fill_esp(image: &Path, scratch: &Path, machine: &Machine) -> Result<()> {
    let kernel = Kernel::find()?;
    let root = scratch.join("esp");
    for dir in ["EFI/BOOT", "loader/entries"] {
        fs::create_dir_all(root.join(dir)).context(|| format!("cannot create {dir}"))?;
    }
    let loader = host::first_file("systemd-boot (package systemd-boot-efi)", LOADERS)?;
    copy(&loader, &root.join("EFI/BOOT/BOOTX64.EFI"))?;
    copy(&kernel.image, &root.join("vmlinuz"))?;
    write(root.join("initrd"), &initramfs::build(&kernel, machine)?)?;
    write(
        root.join("loader/loader.conf"),
        b"timeout 0\ndefault lab.conf\n",
    )?;
    let options = machine.kernel_command_line();
    let entry = format!("title Fathom lab\nlinux /vmlinuz\ninitrd /initrd\noptions {options}\n");
    write(root.join("loader/entries/lab.conf"), entry.as_bytes())?;

    let name = image.to_string_lossy();
    let offset = ESP_START.to_string();
    let kib = (ESP_SECTORS / 2).to_string();
    host::run("mkfs.fat", &["-F", "32", "--offset", &offset, &name, &kib])?;
    let partition = format!("{name}@@{}", ESP_START * SECTOR);
    let mut command = vec!["-s", "-i", &partition];
    let parts = ["EFI", "loader", "vmlinuz", "initrd"]
        .map(|part| root.join(part).to_string_lossy().into_owned());
    command.extend(parts.iter().map(String::as_str));
    command.push("::");
    host::run("mcopy", &command).map(|_| ())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .context(|| format!("cannot copy {}", from.display()))
        .map(|_| ())
}

fn write(path: impl AsRef<Path>, data: &[u8]) -> Result<()> {
    let path = path.as_ref();
    fs::write(path, data).context(|| format!("cannot write {}", path.display()))
}
