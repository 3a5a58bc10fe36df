//! Builds the guest's initramfs: busybox, the modules, and the agent that runs scripts.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cpio::Archive;
use crate::error::{Context, Error, Result};
use crate::kernel::Kernel;
use crate::machine::Machine;
use crate::{agent, host, libraries};

const INIT: &str = include_str!("guest/init.sh");
/// Script that finds a disk by its PCI address.
pub const DISK: &str = include_str!("guest/disk.sh");

/// Packs an initramfs for `kernel` with the modules and programs of `machine`.
///
/// # Errors
/// When busybox, a module or a program is missing.
pub fn build(kernel: &Kernel, machine: &Machine) -> Result<Vec<u8>> {
    let mut archive = base(&kernel.load_modules(&machine.wanted_modules())?)?;
    add_programs(&mut archive, machine)?;
    Ok(archive.finish())
}

/// Packs an initramfs with these programs for a kernel that has all needed drivers built in.
///
/// # Errors
/// When busybox or a program is missing.
pub fn without_modules(programs: Vec<PathBuf>) -> Result<Vec<u8>> {
    let mut archive = base(&[])?;
    let machine = Machine {
        tools: false,
        programs,
        ..Machine::default()
    };
    add_programs(&mut archive, &machine)?;
    Ok(archive.finish())
}

/// Packs the files that all guests have, and modules as (file name, contents) in loading order.
fn base(modules: &[(String, Vec<u8>)]) -> Result<Archive> {
    let mut archive = Archive::default();
    for dir in ["bin", "dev", "etc", "modules", "sysroot"] {
        archive.dir(dir);
    }
    archive.char_device("dev/console", 5, 1);
    archive.file("bin/busybox", 0o755, &read(&busybox()?)?);
    archive.file("bin/disk", 0o755, DISK.as_bytes());
    archive.file("bin/agent", 0o755, agent::SCRIPT.as_bytes());
    archive.file("init", 0o755, INIT.as_bytes());
    for (name, data) in modules {
        archive.file(&format!("modules/{name}"), 0o644, data);
    }
    let order: String = modules
        .iter()
        .map(|(name, _)| format!("{name}\n"))
        .collect();
    archive.file("modules/order", 0o644, order.as_bytes());
    Ok(archive)
}

/// Folder of the programs and their libraries when the tools disk provides /lib and /usr.
const ASIDE: &str = "programs";

/// Adds programs to /bin and their libraries at the same paths as on the host, so that no program
/// is built for guests. With the tools disk, programs and libraries go to a folder of their own. A
/// script in /bin then starts the program with its own loader and libraries.
fn add_programs(archive: &mut Archive, machine: &Machine) -> Result<()> {
    let base = Path::new(if machine.tools { ASIDE } else { "" });
    let (mut needed, mut files) = (BTreeSet::new(), Vec::new());
    for program in &machine.programs {
        let name = program.file_name().unwrap_or_default();
        let libraries = libraries::of(program)?;
        match libraries::loader(program)?.filter(|_| machine.tools) {
            None => files.push((Path::new("bin").join(name), stripped(program)?)),
            Some(loader) => {
                let place = base.join(name);
                let script = caller(&place, &below(base, &loader), &libraries);
                files.push((Path::new("bin").join(name), script.into_bytes()));
                files.push((place, stripped(program)?));
            }
        }
        needed.extend(libraries);
    }
    for library in &needed {
        files.push((below(base, library), read(library)?));
    }
    let parents = files.iter().flat_map(|(path, _)| path.ancestors().skip(1));
    let dirs: BTreeSet<&Path> = parents.filter(|dir| !dir.as_os_str().is_empty()).collect();
    // Sorted, so parents come first.
    for dir in dirs.into_iter().filter(|dir| *dir != Path::new("bin")) {
        archive.dir(&dir.to_string_lossy());
    }
    for (path, data) in &files {
        archive.file(&path.to_string_lossy(), 0o755, data);
    }
    Ok(())
}

fn below(base: &Path, path: &Path) -> PathBuf {
    base.join(path.strip_prefix("/").unwrap_or(path))
}

/// Returns a script that runs a program in the folder [`ASIDE`].
fn caller(program: &Path, loader: &Path, libraries: &[PathBuf]) -> String {
    let dirs: BTreeSet<String> = { libraries.iter().filter_map(|library| library.parent()) }
        .map(|dir| format!("/{ASIDE}{}", dir.display()))
        .collect();
    let dirs = dirs.into_iter().collect::<Vec<_>>().join(":");
    let (loader, program) = (loader.display(), program.display());
    format!("#!/bin/sh\nexec /{loader} --library-path {dirs} /{program} \"$@\"\n")
}

/// Returns the program without its debug information, which is most of its size. The initramfs is
/// unpacked into the guest's memory at every boot. If `strip` is missing or fails, returns the
/// program unchanged.
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

/// Returns the path of the static busybox.
///
/// # Errors
/// When busybox is missing or dynamically linked. Without its libraries, a dynamically linked one
/// would only print "not found" in a guest.
pub fn busybox() -> Result<PathBuf> {
    let path = host::program("busybox")?;
    if libraries::loader(&path)?.is_some() {
        let reason = "not statically linked; install busybox-static (`make setup`)".into();
        return Err(Error::Unusable { path, reason });
    }
    Ok(path)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).context(|| format!("cannot read {}", path.display()))
}
