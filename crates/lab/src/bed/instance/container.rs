//! A container: the lab's small user space in namespaces of this machine's kernel, run by crun. The
//! container's disk is the image's file itself, or a loop device over it. The loop device bypasses
//! this machine's page cache or uses it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::Given;
use super::hosted::Hosted;
use super::loop_device::{LoopDevice, block_device, numbers};
use crate::agent;
use crate::control_groups;
use crate::error::{Context, Result};
use crate::scratch::Scratch;
use crate::{host, initramfs, libraries};

/// Path of the disk under test in the container: a device, or the file.
const DISK: &str = "/dev/disk";
const FILE: &str = "/disk.img";
/// Descriptor in the container from which uploaded data are read.
const UPLOAD: i32 = 5;
const PERIOD_US: u64 = 100_000;
/// Capabilities for mounting, for root's access to files, and for signals.
const CAPABILITIES: &[&str] = &[
    "CAP_SYS_ADMIN",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_KILL",
];
/// Unmounts version 2 of control groups, which crun rejects next to version 1.
const WITHOUT_UNIFIED: &str = r#"umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@""#;
const AGENT: &str = "/bin/busybox --install -s /bin; exec agent";

/// Specification of a container.
#[derive(Clone, Debug)]
pub struct Spec<'a> {
    /// Disk under test; `None` for a container without a disk.
    pub disk: Option<Given<'a>>,
    /// Memory limit in bytes.
    pub memory: Option<u64>,
    /// Limit of CPU time, in CPUs.
    pub cpus: Option<f64>,
    /// Programs of this machine that the container gets, with their libraries.
    pub programs: &'a [PathBuf],
    /// Whether the container is in the network namespace of the thread that starts it.
    pub shares_network: bool,
}

/// A running container, which is killed on drop.
#[derive(Debug)]
pub struct Container {
    // Fields are dropped in order: processes must end before their groups, disk and directory are
    // removed.
    /// Container's first process, with its agent and console.
    pub hosted: Hosted,
    /// Path of the disk under test in the container.
    pub disk: &'static str,
    /// Stream whose data are read from [`UPLOAD`] in the container.
    upload: UnixStream,
    _groups: Groups,
    _disk: Option<LoopDevice>,
    _dir: Scratch,
}

/// Control groups of a container, removed on drop.
#[derive(Debug)]
struct Groups(String);

impl Drop for Groups {
    fn drop(&mut self) {
        control_groups::remove(&self.0);
    }
}

impl Container {
    /// Starts the container.
    ///
    /// # Errors
    /// When the container does not start, with crun's last messages, or a limit cannot be set.
    pub fn start(spec: &Spec) -> Result<Container> {
        check(spec)?;
        let dir = Scratch::small()?;
        let name = dir.name();
        let (disk, device) = match spec.disk {
            Some(Given::Device(image, cache)) => Some(block_device(image, cache)?).unzip(),
            Some(Given::File(_)) | None => (None, None),
        };
        make_root(&dir.path().join("rootfs"), spec.programs)?;
        let path = dir.path().join("config.json");
        let device = device.map(|device| numbers(&device)).transpose()?;
        let bundle = bundle(spec, &name, device);
        fs::write(&path, bundle.to_string())
            .context(|| format!("cannot write {}", path.display()))?;
        let groups = Groups(name.clone());
        let pair = UnixStream::pair();
        let (upload, inside) = pair.context(|| "cannot make a socket".into())?;
        let words = words(spec, &name, dir.path())?;
        let hosted = Hosted::start("crun", &words, vec![(inside, UPLOAD)], dir.path())?;
        Ok(Container {
            hosted,
            disk: match spec.disk {
                Some(Given::File(_)) => FILE,
                _ => DISK,
            },
            upload,
            _groups: groups,
            _disk: disk.flatten(),
            _dir: dir,
        })
    }

    /// Returns the upload stream, and the script extended to read that stream as its standard
    /// input.
    ///
    /// # Errors
    /// When there are too many files open.
    pub fn way_in(&self, script: &str) -> Result<(UnixStream, String)> {
        let stream = self.upload.try_clone();
        let stream = stream.context(|| "cannot send data".into())?;
        Ok((stream, format!("exec <&{UPLOAD}\n{script}")))
    }

    /// Ends the container by closing the agent's stream.
    ///
    /// # Errors
    /// When the container does not end, or fails.
    pub fn end(self) -> Result<()> {
        self.hosted.end()
    }
}

/// Checks the specification before anything is started.
///
/// # Errors
/// When a limit cannot be set on this machine.
pub fn check(spec: &Spec) -> Result<()> {
    let controllers = [
        (spec.cpus.is_some(), "cpu"),
        (spec.memory.is_some(), "memory"),
    ];
    let wanted = controllers.iter().filter(|(is_wanted, _)| *is_wanted);
    wanted
        .map(|(_, name)| *name)
        .try_for_each(control_groups::need_controller)
}

/// Creates the container's root with the same contents as a guest's initramfs.
fn make_root(root: &Path, programs: &[PathBuf]) -> Result<()> {
    let what = || format!("cannot write to {}", root.display());
    for dir in ["bin", "dev", "etc", "mnt", "proc", "sys", "tmp"] {
        fs::create_dir_all(root.join(dir)).context(what)?;
    }
    let (busybox, agent) = (root.join("bin/busybox"), root.join("bin/agent"));
    fs::copy(initramfs::busybox()?, busybox).context(what)?;
    fs::write(&agent, agent::SCRIPT).context(what)?;
    fs::set_permissions(&agent, fs::Permissions::from_mode(0o755)).context(what)?;
    for program in programs {
        let name = program.file_name().unwrap_or_default();
        fs::copy(program, root.join("bin").join(name)).context(what)?;
        for library in libraries::of(program)? {
            let copy = root.join(library.strip_prefix("/").unwrap_or(&library));
            fs::create_dir_all(copy.parent().unwrap_or(root)).context(what)?;
            fs::copy(&library, copy).context(what)?;
        }
    }
    Ok(())
}

/// Returns the program and its arguments. Without limits, no control groups are used.
fn words(spec: &Spec, name: &str, dir: &Path) -> Result<Vec<String>> {
    let (shell, crun) = (host::program("sh")?, host::program("crun")?);
    let path = |path: &Path| path.to_string_lossy().into_owned();
    let mut words = vec![
        path(&shell),
        "-c".into(),
        WITHOUT_UNIFIED.into(),
        "sh".into(),
    ];
    words.extend([path(&crun), "--root".into(), path(&dir.join("state"))]);
    if spec.cpus.is_none() && spec.memory.is_none() {
        words.push("--cgroup-manager=disabled".into());
    }
    words.extend(["run".into(), "--bundle".into(), path(dir)]);
    // crun passes this number of descriptors after the standard ones, the last of which is
    // [`UPLOAD`].
    let count = (UPLOAD - 2).to_string();
    words.extend(["--preserve-fds".into(), count, name.into()]);
    Ok(words)
}

/// Returns the bundle's configuration (OCI runtime specification).
fn bundle(spec: &Spec, name: &str, device: Option<(u32, u32)>) -> Value {
    let kinds = ["pid", "mount", "ipc", "uts", "cgroup"].into_iter();
    let kinds = kinds.chain((!spec.shares_network).then_some("network"));
    let kinds: Vec<Value> = kinds.map(|kind| json!({ "type": kind })).collect();
    let device = device
        .map(|(major, minor)| json!({ "path": DISK, "type": "b", "major": major, "minor": minor }));
    let mut resources = json!({ "devices": [{ "allow": true, "access": "rwm" }] });
    if let Some(cpus) = spec.cpus {
        let quota = (cpus * PERIOD_US as f64) as u64;
        resources["cpu"] = json!({ "quota": quota, "period": PERIOD_US });
    }
    if let Some(bytes) = spec.memory {
        resources["memory"] = json!({ "limit": bytes });
    }
    let mut linux = json!({
        "namespaces": kinds,
        "devices": Vec::from_iter(device),
        // Read-only, because the container shares the kernel with this machine.
        "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"],
    });
    if spec.cpus.is_some() || spec.memory.is_some() {
        linux["cgroupsPath"] = format!("/{name}").into();
        linux["resources"] = resources;
    }
    let mut mounts = vec![
        json!({ "destination": "/proc", "type": "proc", "source": "proc" }),
        json!({ "destination": "/dev", "type": "tmpfs", "source": "dev", "options": ["mode=755"] }),
        json!({ "destination": "/tmp", "type": "tmpfs", "source": "tmp" }),
        json!({ "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"] }),
    ];
    if let Some(Given::File(image)) = spec.disk {
        let file = json!({ "destination": FILE, "source": image, "options": ["bind"] });
        mounts.push(file);
    }
    json!({
        "ociVersion": "1.0.0",
        "process": {
            "user": { "uid": 0, "gid": 0 },
            "args": ["/bin/busybox", "sh", "-c", AGENT],
            "env": ["PATH=/bin", "HOME=/tmp", "lab_inherited=1"],
            "cwd": "/",
            "capabilities": {
                "bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES,
            },
            "noNewPrivileges": true,
        },
        "root": { "path": "rootfs" },
        "hostname": "lab",
        "mounts": mounts,
        "linux": linux,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_the_bundles_where_they_are_given() {
        let mut spec = Spec {
            disk: None,
            memory: None,
            cpus: None,
            programs: &[],
            shares_network: false,
        };
        let free = bundle(&spec, "name", None);
        assert!(free["linux"].get("resources").is_none(), "{free}");
        let line = words(&spec, "name", Path::new("/d")).unwrap().join(" ");
        assert!(line.contains("--cgroup-manager=disabled"), "{line}");
        (spec.cpus, spec.memory) = (Some(0.5), Some(64 << 20));
        let capped = &bundle(&spec, "name", Some((7, 1)))["linux"];
        assert_eq!(capped["cgroupsPath"], "/name");
        assert_eq!(capped["resources"]["cpu"]["quota"], 50_000);
        assert_eq!(capped["resources"]["memory"]["limit"], 64 << 20);
        assert_eq!(capped["devices"][0]["minor"], 1);
        let line = words(&spec, "name", Path::new("/d")).unwrap().join(" ");
        assert!(!line.contains("disabled"), "{line}");
    }

    #[test]
    fn a_network_is_its_own_unless_it_is_shared() {
        let has_own = |shares_network| {
            let spec = Spec {
                disk: None,
                memory: None,
                cpus: None,
                programs: &[],
                shares_network,
            };
            let kinds = bundle(&spec, "name", None)["linux"]["namespaces"].to_string();
            kinds.contains("network")
        };
        assert!(has_own(false) && !has_own(true));
    }
}
