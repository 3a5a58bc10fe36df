//! Capabilities of this machine: programs, QEMU's version, hardware virtualisation.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::error::{Context, Error, Result, Tail};
use crate::words::words;

const SETUP: &str = "run `make setup`";

words! {
    /// How QEMU executes the guest's instructions.
    pub enum Accelerator {
        /// Hardware virtualisation.
        Kvm = "kvm",
        /// QEMU's translator: works everywhere, but is tens of times slower.
        Tcg = "tcg",
    }
}

impl Accelerator {
    /// Chooses KVM only if it is usable *and* the CPU has hardware virtualisation. Some hosts offer
    /// /dev/kvm but emulate every instruction, so that no Linux guest completes its boot.
    pub fn detect() -> Self {
        let usable = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_ok();
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        if usable && has_virtualisation(&cpuinfo) {
            Self::Kvm
        } else {
            Self::Tcg
        }
    }

    pub(crate) fn cpu_model(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => "max",
        }
    }
}

/// Returns whether the CPU has Intel's hardware virtualisation.
pub fn has_vmx() -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    flags(&cpuinfo).any(|flag| flag == "vmx")
}

fn has_virtualisation(cpuinfo: &str) -> bool {
    flags(cpuinfo).any(|flag| flag == "vmx" || flag == "svm")
}

fn flags(cpuinfo: &str) -> impl Iterator<Item = &str> {
    let lines = cpuinfo.lines().filter(|line| line.starts_with("flags"));
    lines.flat_map(str::split_whitespace)
}

/// Finds a program in PATH and in the system directories that an ordinary user's PATH lacks.
///
/// # Errors
/// [`Error::Missing`] with the way to install it.
pub fn program(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| Error::Missing {
            what: name.to_owned(),
            hint: SETUP,
        })
}

/// Returns this user's cache directory, for files that can be recreated. Creates it if needed.
///
/// # Errors
/// When it cannot be created.
pub fn cache_dir() -> Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("fathom");
    fs::create_dir_all(&cache).context(|| format!("cannot create {}", cache.display()))?;
    Ok(cache)
}

/// Returns the first file that exists, for files whose location depends on the distribution.
///
/// # Errors
/// [`Error::Missing`] naming `what`.
pub fn first_file(what: &str, candidates: &[&str]) -> Result<PathBuf> {
    candidates
        .iter()
        .map(PathBuf::from)
        .find(|path| path.is_file())
        .ok_or_else(|| Error::Missing {
            what: what.to_owned(),
            hint: SETUP,
        })
}

/// Returns the bytes of memory that the kernel estimates as available to new programs.
///
/// # Errors
/// When /proc/meminfo cannot be read or has no such line.
pub fn available_memory() -> Result<u64> {
    let path = "/proc/meminfo";
    let text = fs::read_to_string(path).context(|| format!("cannot read {path}"))?;
    let line = { text.lines() }.find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let kib = kib.ok_or_else(|| Error::Protocol(format!("{path} has no MemAvailable")))?;
    Ok(kib.saturating_mul(1024))
}

/// Returns the block device that is mounted on a folder.
///
/// # Errors
/// When no block device is mounted there.
pub fn disk_on(folder: &str) -> Result<PathBuf> {
    let path = "/proc/mounts";
    let text = fs::read_to_string(path).context(|| format!("cannot read {path}"))?;
    let disk = text.lines().find_map(|line| {
        let mut words = line.split(' ');
        let (device, place) = (words.next()?, words.next()?);
        (place == folder && device.starts_with("/dev/")).then(|| PathBuf::from(device))
    });
    disk.ok_or_else(|| Error::Protocol(format!("no disk is mounted on {folder}")))
}

/// Runs a program on the host to its end and returns its standard output.
///
/// # Errors
/// When the program is missing, cannot be started, or fails. The error has its output.
pub fn run(name: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(program(name)?)
        .args(args)
        .output()
        .context(|| format!("cannot run {name}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let said = format!("{text}{}", String::from_utf8_lossy(&output.stderr));
    Err(Error::Program {
        program: format!("{name} {}", args.join(" ")),
        status: output.status.to_string(),
        tail: Tail(said),
    })
}

/// Fails unless QEMU has at least that version.
///
/// # Errors
/// When it is missing or older.
pub fn need_qemu(least: (u32, u32)) -> Result<()> {
    let version = qemu_version()?;
    if version >= least {
        return Ok(());
    }
    Err(Error::TooOld {
        what: format!("QEMU {}.{}", version.0, version.1),
        least: format!("{}.{}", least.0, least.1),
        hint: SETUP,
    })
}

/// Fails unless at least `count` huge pages of 2 MiB are free.
///
/// # Errors
/// When fewer are free. The error says how to reserve them.
pub fn need_huge_pages(count: u64) -> Result<()> {
    const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    let free = fs::read_to_string(POOL).unwrap_or_default();
    match free.trim().parse::<u64>() {
        Ok(free) if free >= count => Ok(()),
        free => Err(Error::Protocol(format!(
            "{count} huge pages of 2 MiB are needed, {} are free: echo {count} \
             >/proc/sys/vm/nr_hugepages",
            free.unwrap_or(0)
        ))),
    }
}

/// Returns QEMU's version as (major, minor).
///
/// # Errors
/// When QEMU is missing or prints no version.
pub fn qemu_version() -> Result<(u32, u32)> {
    // Cached, because each cell of a plan needs the version.
    static KNOWN: OnceLock<(u32, u32)> = OnceLock::new();
    match KNOWN.get() {
        Some(version) => Ok(*version),
        None => ask_qemu().map(|version| *KNOWN.get_or_init(|| version)),
    }
}

fn ask_qemu() -> Result<(u32, u32)> {
    let text = run("qemu-system-x86_64", &["--version"])?;
    let first = text.lines().next().unwrap_or_default();
    let unknown = || format!("qemu-system-x86_64 --version prints no version: '{first}'");
    parse_qemu_version(&text).ok_or_else(|| Error::Protocol(unknown()))
}

fn parse_qemu_version(text: &str) -> Option<(u32, u32)> {
    let version = text.split("version ").nth(1)?;
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtualisation_is_a_flag_of_its_own() {
        assert!(has_virtualisation("flags\t\t: fpu vme svm lm\n"));
        assert!(!has_virtualisation(
            "flags\t\t: fpu svm_lock vmx_fake\nmodel name: vmx\n"
        ));
    }

    #[test]
    fn reads_the_version_of_a_packaged_qemu() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright";
        assert_eq!(parse_qemu_version(text), Some((10, 0)));
        assert_eq!(parse_qemu_version("something else"), None);
    }
}
