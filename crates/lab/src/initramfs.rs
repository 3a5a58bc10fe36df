//! The guest's first file system: busybox, the modules, and the agent that runs scripts.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cpio::Archive;
use crate::error::{Context, Error, Result};
use crate::kernel::Kernel;
use crate::machine::Machine;
use crate::{host, libraries};

const INIT: &str = include_str!("guest/init.sh");
/// Listens to the host; also the first process of a guest that has a root disk.
pub const AGENT: &str = include_str!("guest/agent.sh");
/// Finds a disk by its PCI slot.
pub const DISK: &str = include_str!("guest/disk.sh");

/// Packs an initramfs for `kernel` with what `machine` wants in it.
///
/// # Errors
/// When busybox, a module or a program is missing.
pub fn build(kernel: &Kernel, machine: &Machine) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for dir in ["bin", "dev", "etc", "modules", "sysroot"] {
        archive.dir(dir);
    }
    archive.char_device("dev/console", 5, 1);
    archive.file("bin/busybox", 0o755, &read(&busybox()?)?);
    archive.file("bin/disk", 0o755, DISK.as_bytes());
    archive.file("bin/agent", 0o755, AGENT.as_bytes());
    archive.file("init", 0o755, INIT.as_bytes());
    let modules = kernel.load_modules(&machine.modules)?;
    for (name, data) in &modules {
        archive.file(&format!("modules/{name}"), 0o644, data);
    }
    let order: String = modules
        .iter()
        .map(|(name, _)| format!("{name}\n"))
        .collect();
    archive.file("modules/order", 0o644, order.as_bytes());
    if !machine.programs.is_empty() {
        add_programs(&mut archive, &machine.programs)?;
    }
    Ok(archive.finish())
}

/// Programs go to /bin, their libraries to their own paths: nothing has to be built for guests.
fn add_programs(archive: &mut Archive, programs: &[PathBuf]) -> Result<()> {
    let mut needed = BTreeSet::new();
    let mut dirs = BTreeSet::new();
    for program in programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        archive.file(&format!("bin/{name}"), 0o755, &stripped(program)?);
        needed.extend(libraries::of(program)?);
    }
    for library in &needed {
        let parents = library.ancestors().skip(1).filter_map(relative);
        dirs.extend(parents.map(|dir| dir.to_string_lossy().into_owned()));
    }
    for dir in &dirs {
        archive.dir(dir); // in order, so parents come first
    }
    for library in &needed {
        let path = relative(library).unwrap_or(library).to_string_lossy();
        archive.file(&path, 0o755, &read(library)?);
    }
    Ok(())
}

/// A path below the root, `None` for the root itself.
fn relative(path: &Path) -> Option<&Path> {
    let path = path.strip_prefix("/").unwrap_or(path);
    (!path.as_os_str().is_empty()).then_some(path)
}

/// The program without its debug information, which is most of it: the initramfs is unpacked into
/// the guest's memory at every boot. As it is where no `strip` is installed.
///
/// # Errors
/// When the program cannot be read.
pub fn stripped(program: &Path) -> Result<Vec<u8>> {
    let Ok(strip) = host::program("strip") else {
        return read(program);
    };
    let out = tempfile::NamedTempFile::new().context(|| "cannot create a file".into())?;
    let done = Command::new(strip)
        .arg("-o")
        .arg(out.path())
        .arg(program)
        .output()
        .is_ok_and(|output| output.status.success());
    read(if done { out.path() } else { program })
}

/// Where the static busybox is.
///
/// # Errors
/// When it is missing, or would only say "not found" in a guest, where its libraries are not.
pub fn busybox() -> Result<PathBuf> {
    let path = host::program("busybox")?;
    if libraries::loader(&path)?.is_some() {
        let reason = "it is not static: install busybox-static (`make setup`)".into();
        return Err(Error::Unusable { path, reason });
    }
    Ok(path)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).context(|| format!("cannot read {}", path.display()))
}
