//! A KVM host on a machine without hardware virtualisation. QEMU emulates an AMD CPU with SVM, a
//! Linux with KVM boots on it, and `fathom lab` runs there as on any host.
//!
//! Everything in it is real (kernel, KVM, QEMU, tracepoints) except the time: instructions take
//! tens of times longer, and unevenly so. The KVM host verifies methods, not speeds.

pub(super) mod huge_pages;
mod image;

use std::fs;
use std::iter;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::agent::Output;
use crate::data_port::Lines;
use crate::disk_image::{self, Contents};
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::host::{self, Accelerator};
use crate::initramfs;
use crate::kernel::Kernel;
use crate::libraries;
use crate::machine::{Disk, Machine, QemuDisk};
use crate::scratch::Scratch;

/// Modules that identify the owner of a Unix socket and lay the second disk over the first.
const MODULES: &[&str] = &["unix_diag", "overlay"];
/// Folder on the second disk whose contents are laid over the root disk's folders.
const OVER: &str = "over";
const MEMORY_MIB: u32 = 2048;
/// Size of the sparse disk that is mounted on /var/tmp, in bytes.
const SCRATCH_BYTES: u64 = 4 << 30;

/// A running KVM host. On drop, it is killed and its disks are removed.
#[derive(Debug)]
pub struct KvmHost {
    // Fields are dropped in order: QEMU must end before its disks are removed.
    guest: Guest,
    _dir: Scratch,
}

/// The read-only disks from which a host boots.
struct Disks<'a> {
    root: &'a Path,
    /// Disk with fathom, and with the other files that differ between hosts.
    opt: &'a Path,
    scratch_bytes: u64,
}

impl KvmHost {
    /// Boots a host with `fathom` in its PATH. The root disk is built once and kept in the user's
    /// cache.
    ///
    /// # Errors
    /// When a file is missing, the disk is full, or the host does not boot; the error has the last
    /// lines of its console.
    pub fn boot(fathom: &Path) -> Result<Self> {
        Self::boot_with(fathom, &[], &[])
    }

    /// Returns whether every KVM host has that program.
    pub fn has(program: &str) -> bool {
        image::PROGRAMS.contains(&program) || program == "busybox"
    }

    /// Boots a host with `fathom` and the programs `more` in its PATH. The modules are loaded into
    /// its kernel, and its own guests can load them, too.
    ///
    /// # Errors
    /// Like [`boot`](Self::boot).
    pub fn boot_with(fathom: &Path, more: &[&Path], modules: &[&str]) -> Result<Self> {
        let machine = Machine {
            memory_mib: MEMORY_MIB,
            accelerator: Some(Accelerator::Tcg),
            ..Machine::default()
        };
        Self::boot_new(machine, fathom, more, modules)
    }

    /// Boots a host with this amount of memory, accelerator and time to boot. With KVM, if this
    /// machine has it, the host's own KVM is nested.
    ///
    /// # Errors
    /// Like [`boot`](Self::boot).
    pub fn boot_by(
        accelerator: Accelerator,
        memory_mib: u32,
        patience: Duration,
        fathom: &Path,
    ) -> Result<Self> {
        let machine = Machine {
            memory_mib,
            patience,
            accelerator: Some(accelerator),
            ..Machine::default()
        };
        Self::boot_new(machine, fathom, &[], &[])
    }

    fn boot_new(machine: Machine, fathom: &Path, more: &[&Path], modules: &[&str]) -> Result<Self> {
        let accelerator = machine.accelerator.unwrap_or(Accelerator::Tcg);
        let kernel = Kernel::find()?;
        let root = image::root(&kernel, fathom)?;
        let dir = Scratch::on_disk()?;
        let modules = all_modules(accelerator, modules);
        let opt = make_opt(fathom, more, kernel.module_files(&modules)?, dir.path())?;
        let disks = Disks {
            root: &root,
            opt: &opt,
            scratch_bytes: SCRATCH_BYTES,
        };
        let machine = Machine { modules, ..machine };
        Self::boot_from(&disks, machine, dir)
    }

    /// On a KVM host: boots another one like it from the same disks, which are not changed. Uses
    /// the best accelerator of this machine.
    ///
    /// # Errors
    /// Like [`boot`](Self::boot), and on a machine that is not a KVM host of this kind.
    pub fn boot_same(memory_mib: u32, patience: Duration) -> Result<Self> {
        let (root, opt) = (host::disk_on("/")?, host::disk_on("/opt")?);
        let disks = Disks {
            root: &root,
            opt: &opt,
            scratch_bytes: SCRATCH_BYTES >> 2,
        };
        let accelerator = Accelerator::detect();
        let has_kvm = accelerator == Accelerator::Kvm;
        let machine = Machine {
            memory_mib,
            modules: all_modules(accelerator, &[]),
            accelerator: Some(accelerator),
            huge_pages: Some(has_kvm && huge_pages::reserve(memory_mib)),
            patience,
            ..Machine::default()
        };
        Self::boot_from(&disks, machine, Scratch::on_disk()?)
    }

    fn boot_from(disks: &Disks, machine: Machine, dir: Scratch) -> Result<Self> {
        let scratch = dir.path().join("scratch.img");
        disk_image::sparse(&scratch, disks.scratch_bytes)?;
        disk_image::make_ext4(&scratch, None, disks.scratch_bytes >> 10)?;
        let disk = |id, image: &Path| Disk::qemu(id, QemuDisk::read_only(image));
        let scratch = QemuDisk {
            // The disk is used only until the host ends, so its data need not survive a crash.
            cache: "unsafe".into(),
            read_only: false,
            queues: Some(1),
            ..QemuDisk::read_only(&scratch)
        };
        let mut machine = Machine {
            // A single CPU: with two, the kernel marks the TSC as unstable, and guests in the host
            // die.
            cpus: 1,
            disks: vec![
                disk("root", disks.root),
                disk("fathom", disks.opt),
                Disk::qemu("scratch", scratch),
            ],
            tools: false,
            root: Some("root".into()),
            // After a panic QEMU exits, and the console shows the reason.
            extra: vec!["-no-reboot".into()],
            ..machine
        };
        for id in ["fathom", "scratch"] {
            let slot = machine.slot_of(id).unwrap_or_default();
            machine.append.push(format!("lab_{id}={slot:02x}"));
        }
        let mut guest = Guest::boot(&machine)?;
        guest.check(
            "test -c /dev/kvm && fathom --version",
            Duration::from_secs(60),
        )?;
        Ok(Self { guest, _dir: dir })
    }

    /// Returns the process id of the host's QEMU.
    pub fn pid(&self) -> u32 {
        self.guest.pid()
    }

    /// Runs a shell script and passes each line of its output and errors to `line` while it runs.
    /// Returns its exit status.
    ///
    /// # Errors
    /// When the host does not respond, or the script does not end in time.
    pub fn run(
        &mut self,
        script: &str,
        timeout: Duration,
        line: &mut dyn FnMut(&str),
    ) -> Result<i32> {
        let mut lines = Lines::default();
        let script = format!("exec 2>&1\n{script}");
        let output = self.guest.stream(&script, timeout, &mut |chunk| {
            lines.push(chunk, &mut |text| {
                line(text);
                Ok(())
            })
        })?;
        if let Some(rest) = lines.rest() {
            line(&rest);
        }
        if output.status == 124 {
            return Err(Error::Timeout {
                what: "in the KVM host".into(),
                after: timeout,
                tail: crate::process::tail_of(&output.text),
            });
        }
        Ok(output.status)
    }

    /// Runs a shell script that must succeed and returns its output.
    ///
    /// # Errors
    /// Like [`run`](Self::run), and when the script fails.
    pub fn check(&mut self, script: &str, timeout: Duration) -> Result<String> {
        self.guest.check(script, timeout)
    }

    /// Runs a shell script.
    ///
    /// # Errors
    /// When the host does not respond.
    pub fn output(&mut self, script: &str, timeout: Duration) -> Result<Output> {
        self.guest.run(script, timeout)
    }

    /// Copies a folder of the KVM host into a folder on this machine.
    ///
    /// # Errors
    /// When there is no such folder, the host does not respond, or this machine's disk is full.
    pub fn fetch(&mut self, dir: &str, into: &Path, timeout: Duration) -> Result<()> {
        self.guest.fetch(dir, into, timeout)
    }
}

/// Returns the modules of a host's kernel. The KVM module must match its CPU: QEMU emulates SVM,
/// not VMX.
fn all_modules(accelerator: Accelerator, more: &[&str]) -> Vec<String> {
    let kvm = match accelerator {
        Accelerator::Kvm if host::has_vmx() => "kvm_intel",
        Accelerator::Kvm | Accelerator::Tcg => "kvm_amd",
    };
    let all = std::iter::once(kvm).chain(MODULES.iter().chain(more).copied());
    all.map(str::to_owned).collect()
}

/// Builds the second disk, which the host mounts on /opt. The disk has the files that differ
/// between hosts: programs, their libraries and the kernel's modules.
fn make_opt(
    fathom: &Path,
    more: &[&Path],
    modules: Vec<(PathBuf, PathBuf)>,
    dir: &Path,
) -> Result<PathBuf> {
    let over = |path: &Path| Path::new(OVER).join(path.strip_prefix("/").unwrap_or(path));
    let mut contents = Contents::default();
    for (program, name) in iter::once((fathom, "fathom")).chain(more.iter().map(|p| (*p, ""))) {
        let name = match name {
            "" => program.file_name().unwrap_or_default(),
            name => name.as_ref(),
        };
        let stripped = dir.join(name);
        let what = || format!("cannot write {}", stripped.display());
        fs::write(&stripped, initramfs::stripped(program)?).context(what)?;
        fs::set_permissions(&stripped, fs::Permissions::from_mode(0o755)).context(what)?;
        contents.file_as(&stripped, Path::new(name));
    }
    // The libraries of fathom are on the root disk.
    for program in more {
        for library in libraries::of(program)? {
            contents.file_as(&library, &over(&library));
        }
    }
    for (file, home) in modules {
        contents.file_as(&file, &over(&home));
    }
    let image = dir.join("opt.img");
    contents.make(dir, &image)?;
    Ok(image)
}
