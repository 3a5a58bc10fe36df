//! The guest's kernel: found on this machine, with the modules a guest needs.

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
/// Where `make demo` unpacks a kernel, in the cache.
const UNPACKED: &str = "kernel/boot";

/// Loaded in every guest, with what they depend on.
const WANTED: &[&str] = &["virtio_pci", "virtio_blk", "virtio_console", "ext4"];
/// Wanted where the kernel has them: ext4 asks for its checksum by name, and kernels differ in
/// whether that is a module, built in, or library code.
const OPTIONAL: &[&str] = &["crc32c_generic", "crc32c"];

/// A kernel image and the directory of its modules.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The bootable image.
    pub image: PathBuf,
    /// Its release, as `uname -r` says it.
    pub release: String,
    modules: PathBuf,
}

impl Kernel {
    /// Finds a kernel: `FATHOM_KERNEL` if set, else the newest of Debian's cloud kernels in /boot or
    /// unpacked by `make demo`, else the newest readable one that has its modules.
    ///
    /// # Errors
    /// [`Error::Missing`] with the way to get one.
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

    /// The kernel that is at a path like `/boot/vmlinuz-RELEASE`.
    ///
    /// # Errors
    /// When there is none, or its modules are not where they belong.
    pub fn named(path: &Path) -> Result<Self> {
        Self::at(path).ok_or_else(|| Error::Unusable {
            path: path.to_owned(),
            reason: "not a readable vmlinuz-RELEASE with modules in \
                     /lib/modules/RELEASE"
                .into(),
        })
    }

    /// The same kernel as an ELF file, which is written to `path`: nothing is left to be unpacked when
    /// it boots.
    ///
    /// # Errors
    /// When it is packed in a way that is not known, or the program is missing that unpacks it.
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
        // Those of an unpacked package are beside its /boot.
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

    /// The modules for a guest as (file name, contents), in loading order: the lab's own and
    /// `more`. What is built into the kernel is left out.
    ///
    /// # Errors
    /// When the kernel lacks one, or a compressed one cannot be unpacked.
    pub fn load_modules(&self, more: &[String]) -> Result<Vec<(String, Vec<u8>)>> {
        let order = self.order(more)?;
        order.iter().map(|path| self.read_module(path)).collect()
    }

    /// The image, and the path at which [`find`](Self::find) looks for it.
    pub fn image_file(&self) -> (PathBuf, PathBuf) {
        let boot = Path::new("/boot").join(format!("vmlinuz-{}", self.release));
        (self.image.clone(), boot)
    }

    /// The files that a lab needs below /lib/modules to make guests that load the lab's modules and
    /// `more`: where each is, and where it belongs.
    ///
    /// # Errors
    /// When the kernel lacks one of these.
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
    /// When it does not, with the way to get one that has.
    pub fn need_module(&self, name: &'static str) -> Result<()> {
        self.order(&[name.to_owned()]).map(drop)
    }

    /// Paths of modules below the kernel's directory, in loading order.
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

/// The program that unpacks a compressed module.
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

/// "kernel/fs/ext4/ext4.ko.xz" -> "ext4"; dashes and underscores are the same to the kernel.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

/// Paths of all wanted modules in an order in which each comes after what it depends on.
/// The error names the module that is neither a file nor built in.
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
            // depmod lists everything that is needed, the nearest first.
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
