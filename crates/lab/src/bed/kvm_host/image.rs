//! The root disk of the KVM host: what a machine has on which `fathom lab` runs, at the usual
//! places.

use std::path::{Path, PathBuf};

use crate::disk_image::Contents;
use crate::error::{Error, Result};
use crate::kernel::{self, Kernel};
use crate::{agent, host, initramfs};

const INIT: &str = include_str!("init.sh");

/// Beyond busybox.
pub const PROGRAMS: &[&str] = &[
    "qemu-system-x86_64",
    "qemu-storage-daemon",
    "mke2fs",
    "e2fsck",
    "blkdiscard",
    "fio",
];
/// What QEMU loads for the lab's guests; a version that has no such file does without.
const FIRMWARE: &[&str] = &[
    "bios-256k.bin",
    "kvmvapic.bin",
    "linuxboot.bin",
    "linuxboot_dma.bin",
    "pvh.bin",
];
/// Where it is there; libraries of some distributions are found only by the loader's cache.
const CONFIGURATION: &[&str] = &["/etc/mke2fs.conf", "/etc/ld.so.cache"];
const DIRECTORIES: &[&str] = &[
    "proc", "sys", "dev", "tmp", "run", "opt", "root", "var/tmp", "etc",
];

/// The image, made when it is not in the cache yet. `fathom` is not in it, because it changes too
/// often; its libraries are.
///
/// # Errors
/// When something is missing or the image cannot be made.
pub fn root(kernel: &Kernel, fathom: &Path) -> Result<PathBuf> {
    let mut contents = Contents::default();
    for dir in DIRECTORIES {
        contents.dir(dir);
    }
    for name in PROGRAMS {
        let program = host::program(name)?;
        contents.program(&program, &Path::new("/usr/bin").join(name))?;
    }
    contents.libraries(fathom)?;
    add_kernel(&mut contents, kernel)?;
    add_firmware(&mut contents)?;
    for path in CONFIGURATION.iter().map(Path::new).filter(|p| p.is_file()) {
        contents.file(path);
    }
    add_busybox(&mut contents)?;
    contents.script("sbin/init", INIT);
    contents.script("bin/agent", agent::SCRIPT);
    contents.script("bin/disk", initramfs::DISK);
    contents.cached("kvm-host")
}

fn add_kernel(contents: &mut Contents, kernel: &Kernel) -> Result<()> {
    let (from, to) = kernel.image_file();
    contents.file_as(&from, &to);
    // Modules are on the other disk, which ones depends on who asks.
    let files = kernel.module_files(&[])?;
    if let Some(name) = files.iter().find_map(|(file, _)| kernel::unpacker(file)) {
        let program = host::program(name)?;
        contents.program(&program, &Path::new("/usr/bin").join(name))?;
    }
    Ok(())
}

fn add_firmware(contents: &mut Contents) -> Result<()> {
    let text = host::run("qemu-system-x86_64", &["-L", "help"])?;
    let dirs: Vec<&Path> = text.lines().map(|line| Path::new(line.trim())).collect();
    let mut found = 0;
    for name in FIRMWARE {
        let path = dirs.iter().map(|dir| dir.join(name)).find(|p| p.is_file());
        if let Some(path) = path {
            contents.file(&path);
            found += 1;
        }
    }
    if found == 0 {
        let hint = "run `make setup`";
        return Err(Error::Missing {
            what: "QEMU's firmware (seabios)".into(),
            hint,
        });
    }
    Ok(())
}

fn add_busybox(contents: &mut Contents) -> Result<()> {
    contents.file_as(&initramfs::busybox()?, Path::new("bin/busybox"));
    for applet in host::run("busybox", &["--list"])?.lines() {
        if applet != "busybox" {
            contents.link(&format!("bin/{applet}"), "busybox");
        }
    }
    Ok(())
}
