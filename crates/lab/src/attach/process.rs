//! Reads /proc about QEMU and its disks' servers.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use fathom_run::{Role, Thread};

use super::options::Options;
use crate::error::{Context, Error, Result};

/// Returns the command line of a process.
///
/// # Errors
/// When the process does not exist, or only root may read it.
pub(super) fn arguments(pid: u32) -> Result<Vec<String>> {
    let path = format!("/proc/{pid}/cmdline");
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::Protocol(format!("there is no process {pid}")));
        }
        other => other.context(|| format!("cannot read {path}"))?,
    };
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.split_terminator('\0').map(str::to_owned).collect())
}

/// Resolves a path from a process's command line, which may be relative to its working directory.
pub(super) fn path_of(pid: u32, path: &str) -> PathBuf {
    match fs::read_link(format!("/proc/{pid}/cwd")) {
        Ok(cwd) => cwd.join(path),
        Err(_) => path.into(),
    }
}

/// Returns QEMU's threads with the roles that their names show (`-name debug-threads=on`). KVM's
/// debugfs identifies the vCPUs also without names.
pub fn threads_of(pid: u32) -> Vec<Thread> {
    let vcpus = super::debugfs::vcpu_threads(pid);
    tasks(pid)
        .map(|(tid, name)| {
            let known = vcpus
                .iter()
                .find(|(_, of)| *of == tid)
                .map(|(vcpu, _)| *vcpu);
            let vcpu = known.or_else(|| vcpu_number(&name));
            let role = match name.as_str() {
                _ if vcpu.is_some() => Role::Vcpu,
                _ if tid == pid => Role::Main,
                "worker" => Role::Pool,
                name => kernel_helper(name).unwrap_or(if name.starts_with("IO ") {
                    Role::Io
                } else {
                    Role::Other
                }),
            };
            Thread {
                pid,
                tid,
                name,
                role,
                vcpu,
            }
        })
        .collect()
}

/// Returns the threads of a disk's server. Fathom names them `worker 0`, `worker 1`, ... In
/// qemu-storage-daemon, the main thread or an iothread serves the disk.
pub fn server_threads(pid: u32) -> Vec<Thread> {
    let role = |tid: u32, name: &str| match name {
        "worker" => Role::Pool,
        name if name.starts_with("worker ") || name.starts_with("IO ") => Role::Io,
        name => match kernel_helper(name) {
            Some(role) => role,
            None if tid == pid => Role::Main,
            None => Role::Other,
        },
    };
    tasks(pid)
        .map(|(tid, name)| Thread {
            pid,
            tid,
            role: role(tid, &name),
            name,
            vcpu: None,
        })
        .collect()
}

/// Returns the role of io_uring's workers and pollers, which are threads of the process that uses
/// it.
fn kernel_helper(name: &str) -> Option<Role> {
    if name.starts_with("iou-wrk-") {
        return Some(Role::Pool);
    }
    name.starts_with("iou-sqp-").then_some(Role::Io)
}

fn tasks(pid: u32) -> impl Iterator<Item = (u32, String)> {
    let entries = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten();
    let mut tasks: Vec<(u32, String)> = entries
        .flatten()
        .filter_map(|entry| {
            let tid = entry.file_name().to_str()?.parse().ok()?;
            let name = fs::read_to_string(entry.path().join("comm")).ok()?;
            Some((tid, name.trim_end().to_owned()))
        })
        .collect();
    tasks.sort_unstable();
    tasks.into_iter()
}

/// Parses a thread name such as `CPU 3/KVM`.
fn vcpu_number(name: &str) -> Option<u32> {
    let (number, accelerator) = name.strip_prefix("CPU ")?.split_once('/')?;
    let is_vcpu = matches!(accelerator, "KVM" | "TCG");
    number.parse().ok().filter(|_| is_vcpu)
}

/// Returns the accelerator. A process that has a KVM virtual machine open uses KVM.
pub(super) fn accelerator(pid: u32, options: &Options) -> String {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    let mut links = entries
        .flatten()
        .filter_map(|fd| fs::read_link(fd.path()).ok());
    let is_kvm = links.any(|link| link == Path::new("anon_inode:kvm-vm"));
    if is_kvm {
        return "kvm".into();
    }
    options.accelerator.clone().unwrap_or_else(|| "tcg".into())
}

/// Runs the process's program with `--version`, even if its file has been replaced since. As root,
/// runs it as the process's owner, to whom the program belongs.
pub(super) fn qemu_version(pid: u32) -> Option<String> {
    let owner = fs::metadata(format!("/proc/{pid}")).ok()?;
    let mut command = Command::new(format!("/proc/{pid}/exe"));
    command.arg("--version");
    if rustix::process::geteuid().is_root() {
        command.gid(owner.gid()).uid(owner.uid());
    }
    let output = command.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().next()?.split("version ").nth(1)?;
    Some(version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_are_known_by_name() {
        assert_eq!(vcpu_number("CPU 12/KVM"), Some(12));
        assert_eq!(vcpu_number("CPU 0/TCG"), Some(0));
        assert_eq!(vcpu_number("CPU x/KVM"), None);
        assert_eq!(vcpu_number("CPU 0/other"), None);
        assert_eq!(vcpu_number("IO iothread0"), None);
    }

    #[test]
    fn a_process_that_is_not_there_is_said() {
        let error = arguments(u32::MAX).unwrap_err().to_string();
        assert!(error.contains("no process 4294967295"), "{error}");
    }
}
