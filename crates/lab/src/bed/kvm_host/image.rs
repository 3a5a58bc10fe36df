//! Builds the root disk of the KVM host, with the files that `fathom lab` needs at their usual
//! paths.

use std::path::{Path, PathBuf};

use crate::disk_image::Contents;
use crate::error::{Error, Result};
use crate::kernel::{self, Kernel};
use crate::{agent, host, initramfs};

const INIT: &str = include_str!("init.sh");

/// Programs in addition to busybox.
pub const PROGRAMS: &[&str] = &[
    "qemu-system-x86_64",
    "qemu-storage-daemon",
    "mke2fs",
    "e2fsck",
    "blkdiscard",
    "fio",
];
/// Files that QEMU loads for the lab's guests. A QEMU version without one of them does not need it.
const FIRMWARE: &[&str] = &[
    "bios-256k.bin",
    "kvmvapic.bin",
    "linuxboot.bin",
    "linuxboot_dma.bin",
    "pvh.bin",
];
/// Files that are added if they exist. On some distributions only the loader's cache finds
/// libraries.
const CONFIGURATION: &[&str] = &["/etc/mke2fs.conf", "/etc/ld.so.cache"];
const DIRECTORIES: &[&str] = &[
    "proc", "sys", "dev", "tmp", "run", "opt", "root", "var/tmp", "etc",
];

/// Returns the image from the cache, or builds it. `fathom` itself is not in the image, because it
/// changes too often; its libraries are.
///
/// # Errors
/// When a file is missing or the image cannot be built.
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
    // The modules are on the other disk, because they differ between callers.
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
