//! The guest's first file system: busybox, the modules, and the agent that runs scripts.

use std::fs;
use std::process::Command;

use crate::cpio::Archive;
use crate::error::{Context, Error, Result};
use crate::host;
use crate::kernel::Kernel;

const INIT: &str = include_str!("guest/init.sh");
const DISK: &str = include_str!("guest/disk.sh");

/// Packs an initramfs for `kernel`.
///
/// # Errors
/// When busybox or a module is missing.
pub fn build(kernel: &Kernel) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for dir in ["bin", "dev", "etc", "modules"] {
        archive.dir(dir);
    }
    archive.char_device("dev/console", 5, 1);
    archive.file("bin/busybox", 0o755, &busybox()?);
    archive.file("bin/disk", 0o755, DISK.as_bytes());
    archive.file("init", 0o755, INIT.as_bytes());
    let modules = kernel.load_modules()?;
    for (name, data) in &modules {
        archive.file(&format!("modules/{name}"), 0o644, data);
    }
    let order: String = modules
        .iter()
        .map(|(name, _)| format!("{name}\n"))
        .collect();
    archive.file("modules/order", 0o644, order.as_bytes());
    Ok(archive.finish())
}

fn busybox() -> Result<Vec<u8>> {
    let path = host::program("busybox")?;
    // A dynamic busybox would only say "not found" in the guest, where its libraries are not.
    let ldd = Command::new("ldd")
        .arg(&path)
        .output()
        .context(|| "cannot run ldd".into())?;
    if ldd.status.success() && String::from_utf8_lossy(&ldd.stdout).contains("=>") {
        let reason = "it is not static: install busybox-static (`make setup`)".into();
        return Err(Error::Unusable { path, reason });
    }
    fs::read(&path).context(|| format!("cannot read {}", path.display()))
}
