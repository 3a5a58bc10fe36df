//! Finds the guest's kernel on this machine, and the modules that a guest needs.

mod packed;

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Context, Error, Result};
use crate::host;

const HINT: &str =
    "install linux-image-cloud-amd64 (`make setup`) or name a kernel in FATHOM_KERNEL";

const MODULE_HINT: &str = "install a kernel that has it (linux-image-amd64) and name its /boot/vmlinuz-RELEASE in \
     FATHOM_KERNEL";

const MODULES: &str = "/lib/modules";
/// Path in the cache where `make demo` unpacks a kernel.
const UNPACKED: &str = "kernel/boot";

/// Modules that every guest loads, together with their dependencies.
const WANTED: &[&str] = &["virtio_pci", "virtio_blk", "virtio_console", "ext4"];
/// Modules that are loaded if the kernel has them as files. ext4 requests its checksum by name, and
/// kernels provide it as a module, built in, or as library code.
const OPTIONAL: &[&str] = &["crc32c_generic", "crc32c"];

/// A kernel image and the directory of its modules.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The bootable image.
    pub image: PathBuf,
    /// Kernel release, as `uname -r` prints it.
    pub release: String,
    modules: PathBuf,
}

impl Kernel {
    /// Finds a kernel. `FATHOM_KERNEL` wins if set. Otherwise the newest of Debian's cloud kernels
    /// is chosen, in /boot or unpacked by `make demo`. Without one, it is the newest readable
    /// kernel that has its modules.
    ///
    /// # Errors
    /// [`Error::Missing`] with the way to install a kernel.
    pub fn find() -> Result<Self> {
        if let Some(path) = std::env::var_os("FATHOM_KERNEL") {
            let path = PathBuf::from(path);
            return Self::at(&path).ok_or_else(|| Error::Unusable {
                path,
                reason: "FATHOM_KERNEL must name a readable vmlinuz-RELEASE whose modules are \
                         in /lib/modules/RELEASE"
                    .into(),
            });
        }
        let unpacked = host::cache_dir()?.join(UNPACKED);
        let folders = [Path::new("/boot"), &unpacked];
        let files = { folders.iter() }.filter_map(|folder| fs::read_dir(folder).ok());
        { files.flatten() }
            .filter_map(|entry| Self::at(&entry.ok()?.path()))
            .max_by(|a, b| a.preference().cmp(&b.preference()).then(a.age(b)))
            .ok_or_else(|| Error::Missing {
                what: "a kernel for the guest".into(),
                hint: HINT,
            })
    }

    /// Returns the kernel at a path like `/boot/vmlinuz-RELEASE`.
    ///
    /// # Errors
    /// When the path has no kernel, or its modules are missing.
    pub fn named(path: &Path) -> Result<Self> {
        Self::at(path).ok_or_else(|| Error::Unusable {
            path: path.to_owned(),
            reason: "not a readable vmlinuz-RELEASE with modules in \
                     /lib/modules/RELEASE"
                .into(),
        })
    }

    /// Decompresses the kernel into an ELF file at `path`, so that booting need not decompress it.
    ///
    /// # Errors
    /// When the compression is unknown, or the program that decompresses it is missing.
    pub fn unpacked(&self, path: &Path) -> Result<Self> {
        let what = || format!("cannot read {}", self.image.display());
        let elf = packed::unpack(&fs::read(&self.image).context(what)?);
        let elf = elf.map_err(|reason| Error::Unusable {
            path: self.image.clone(),
            reason,
        })?;
        fs::write(path, elf).context(|| format!("cannot write {}", path.display()))?;
        Ok(Self {
            image: path.to_owned(),
            ..self.clone()
        })
    }

    fn at(image: &Path) -> Option<Self> {
        let release = image
            .file_name()?
            .to_str()?
            .strip_prefix("vmlinuz-")?
            .to_owned();
        fs::File::open(image).ok()?;
        // The modules of an unpacked package are next to its /boot.
        let beside = image
            .parent()?
            .parent()
            .map(|root| root.join("lib/modules"));
        let folders = [Some(MODULES.into()), beside].into_iter().flatten();
        let mut modules = folders.map(|folder| folder.join(&release));
        Some(Self {
            modules: modules.find(|modules| modules.join("modules.dep").is_file())?,
            image: image.to_owned(),
            release,
        })
    }

    fn preference(&self) -> bool {
        self.release.contains("-cloud-")
    }

    fn age(&self, other: &Self) -> Ordering {
        numbers(&self.release).cmp(&numbers(&other.release))
    }

    /// Returns the modules for a guest as (file name, contents), in loading order: the lab's own
    /// and `more`. Modules that are built into the kernel are left out.
    ///
    /// # Errors
    /// When the kernel lacks a module, or a compressed module cannot be decompressed.
    pub fn load_modules(&self, more: &[String]) -> Result<Vec<(String, Vec<u8>)>> {
        let order = self.order(more)?;
        order.iter().map(|path| self.read_module(path)).collect()
    }

    /// Returns the image, and the path at which [`find`](Self::find) looks for it.
    pub fn image_file(&self) -> (PathBuf, PathBuf) {
        let boot = Path::new("/boot").join(format!("vmlinuz-{}", self.release));
        (self.image.clone(), boot)
    }

    /// Returns the files below /lib/modules that a nested lab needs to build guests with the lab's
    /// modules and `more`. Each entry has the file's current path and its path in the nested lab.
    ///
    /// # Errors
    /// When the kernel lacks one of the modules.
    pub fn module_files(&self, more: &[String]) -> Result<Vec<(PathBuf, PathBuf)>> {
        let lists = ["modules.dep", "modules.builtin"].map(String::from);
        let names = lists.into_iter().chain(self.order(more)?);
        let home = Path::new(MODULES).join(&self.release);
        Ok(names
            .map(|name| (self.modules.join(&name), home.join(&name)))
            .collect())
    }

    /// Fails unless the kernel has a module, as a file or built in.
    ///
    /// # Errors
    /// When the kernel lacks the module. The error says how to install a kernel that has it.
    pub fn need_module(&self, name: &'static str) -> Result<()> {
        self.order(&[name.to_owned()]).map(drop)
    }

    /// Returns the modules' paths relative to the kernel's module directory, in loading order.
    fn order(&self, more: &[String]) -> Result<Vec<String>> {
        let read = |name: &str| {
            let path = self.modules.join(name);
            fs::read_to_string(&path).context(|| format!("cannot read {}", path.display()))
        };
        load_order(&read("modules.dep")?, &read("modules.builtin")?, more).map_err(|what| {
            Error::Missing {
                hint: match more.iter().any(|name| what.ends_with(name)) {
                    true => MODULE_HINT,
                    false => HINT,
                },
                what: format!("{what} of {}", self.release),
            }
        })
    }

    fn read_module(&self, relative: &str) -> Result<(String, Vec<u8>)> {
        let path = self.modules.join(relative);
        let name = format!("{}.ko", module_name(relative));
        let Some(unpack) = unpacker(&path) else {
            let data = fs::read(&path).context(|| format!("cannot read {}", path.display()))?;
            return Ok((name, data));
        };
        let output = Command::new(host::program(unpack)?)
            .args(["-d", "-c"])
            .arg(&path)
            .output()
            .context(|| format!("cannot run {unpack}"))?;
        if !output.status.success() {
            let reason = format!("{unpack} cannot unpack it");
            return Err(Error::Unusable { path, reason });
        }
        Ok((name, output.stdout))
    }
}

/// Returns the program that decompresses a module, or `None` if the module is not compressed.
pub fn unpacker(module: &Path) -> Option<&'static str> {
    match module.extension()?.to_str()? {
        "xz" => Some("xz"),
        "zst" => Some("zstd"),
        "gz" => Some("gzip"),
        _ => None,
    }
}

fn numbers(release: &str) -> Vec<u64> {
    release
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|n| n.parse().ok())
        .collect()
}

/// Returns a module's name: "kernel/fs/ext4/ext4.ko.xz" gives "ext4". The kernel treats dashes and
/// underscores alike.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

/// Returns the paths of all wanted modules, each after its dependencies. The error names a module
/// that is neither a file nor built in.
fn load_order(
    modules_dep: &str,
    modules_builtin: &str,
    more: &[String],
) -> std::result::Result<Vec<String>, String> {
    let builtin: HashSet<String> = modules_builtin.lines().map(module_name).collect();
    let files: HashMap<String, (&str, &str)> = modules_dep
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(path, needs)| (module_name(path), (path, needs)))
        .collect();
    let mut order: Vec<String> = Vec::new();
    let wanted = WANTED.iter().copied().map(|name| (name, true));
    let optional = OPTIONAL.iter().copied().map(|name| (name, false));
    let more = more.iter().map(|name| (name.as_str(), true));
    for (name, required) in wanted.chain(optional).chain(more) {
        match files.get(name) {
            // depmod lists all dependencies, direct ones first.
            Some((path, needs)) => {
                let all = needs.split_whitespace().rev().chain([*path]);
                for path in all {
                    if !order.iter().any(|known| known == path) {
                        order.push(path.to_owned());
                    }
                }
            }
            None if required && !builtin.contains(name) => return Err(format!("module {name}")),
            None => {}
        }
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "\
kernel/drivers/virtio/virtio_ring.ko:
kernel/drivers/virtio/virtio.ko: kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio-pci.ko.xz: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/block/virtio_blk.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/fs/ext4/ext4.ko: kernel/fs/mbcache.ko
kernel/fs/mbcache.ko:
";

    #[test]
    fn modules_come_after_what_they_need() {
        let order = load_order(DEP, "kernel/drivers/char/virtio_console.ko\n", &[]).unwrap();
        let names: Vec<_> = order.iter().map(|path| module_name(path)).collect();
        assert_eq!(
            names,
            [
                "virtio_ring",
                "virtio",
                "virtio_pci",
                "virtio_blk",
                "mbcache",
                "ext4"
            ]
        );
    }

    #[test]
    fn a_module_that_is_nowhere_is_named() {
        assert_eq!(
            load_order(DEP, "", &[]).unwrap_err(),
            "module virtio_console"
        );
    }

    #[test]
    fn newer_means_larger_numbers() {
        assert!(numbers("6.12.1-cloud-amd64") > numbers("6.1.0-56-cloud-amd64"));
        assert!(numbers("6.1.0-9-cloud-amd64") < numbers("6.1.0-56-cloud-amd64"));
    }
}
