//! User-mode Linux: a kernel that is a process of this machine. Its disk is a `ubd` device, the agent
//! is at a serial line, and what is sent in is a file of this machine's (hostfs).
//!
//! Serial lines are good for little: one whose buffers are full may stand still for good (Linux 6.1).

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use super::super::image;
use super::hosted::{AGENT, Hosted};
use super::{Cache, Spec};
use crate::error::{Context, Error, Result};
use crate::process::tail_of;
use crate::scratch::Scratch;
use crate::{host, initramfs};

/// As Debian calls it.
pub const PROGRAM: &str = "linux.uml";
/// The disk under test inside.
pub const DISK: &str = "/dev/ubda";
/// What a line's buffer takes (4 KiB), in base64 and with some room.
const MAX_SCRIPT: usize = 2500;
/// The folder that is seen inside, and what is in it.
const SHARED: &str = "shared";
const UPLOAD: &str = "upload";
const PRINTED: &str = "printed";
const MEMORY: u64 = 256 << 20;
/// Its last words: nothing is left to be done.
const HALTED: &str = "reboot: System halted";
/// Time for the console's last lines to be read after the process has ended.
const LAST_LINES: Duration = Duration::from_secs(5);
/// Its words when the host's CPU has more registers than it knows of.
const REGISTERS: &str = "ptrace set fp regs failed";
const AMX: &str = "user-mode Linux cannot run here: it knows nothing of the AMX registers that this \
     machine's CPU has, and panics at its first process; leave out --bed uml";

/// A kernel that has booted. It is killed on drop.
#[derive(Debug)]
pub struct Uml {
    // Fields are dropped in order: the kernel goes before its directory.
    pub hosted: Hosted,
    dir: Scratch,
}

impl Uml {
    /// Boots it.
    ///
    /// # Errors
    /// When it does not come up, with its last words.
    pub fn start(spec: &Spec) -> Result<Uml> {
        let dir = Scratch::small()?;
        let initrd = dir.path().join("initramfs");
        fs::write(&initrd, initramfs::without_modules(spec.programs()?)?)
            .context(|| format!("cannot write {}", initrd.display()))?;
        let shared = dir.path().join(SHARED);
        fs::create_dir(&shared).context(|| format!("cannot create {}", shared.display()))?;
        let words = words(spec, dir.path())?;
        let hosted = Hosted::start("user-mode Linux", &words, Vec::new(), dir.path());
        let hosted = hosted.map_err(|error| match error.to_string().contains(REGISTERS) {
            true => Error::Protocol(AMX.into()),
            false => error,
        })?;
        Ok(Uml { hosted, dir })
    }

    /// Runs a shell script that must succeed and returns what it printed.
    ///
    /// # Errors
    /// When the agent does not answer, or the script is too long, fails or does not end in time.
    pub fn check(&mut self, script: &str, timeout: Duration) -> Result<String> {
        match script.len() > MAX_SCRIPT {
            true => Err(Error::Protocol(format!(
                "a script in user-mode Linux has at most {MAX_SCRIPT} bytes, and not {}",
                script.len()
            ))),
            false => self.hosted.check(script, timeout),
        }
    }

    /// The same for a script that prints more than a line's buffer takes: into a file of this
    /// machine's.
    ///
    /// # Errors
    /// Likewise.
    pub fn printed(&mut self, script: &str, timeout: Duration) -> Result<String> {
        let path = self.dir.path().join(SHARED).join(PRINTED);
        let script = format!(
            "mkdir -p /tmp/host; mount -t hostfs none /tmp/host
             exec >/tmp/host/{PRINTED} 2>&1
             {script}"
        );
        let done = self.check(&script, timeout);
        let text = fs::read(&path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        match done {
            Ok(_) => Ok(text),
            Err(Error::Guest { script, status, .. }) => Err(Error::Guest {
                script,
                status,
                tail: tail_of(&text),
            }),
            Err(error) => Err(error),
        }
    }

    /// The same for a script with so many MiB on its standard input.
    ///
    /// # Errors
    /// Likewise, and when the file cannot be written.
    pub fn upload(&mut self, mib: u64, script: &str, timeout: Duration) -> Result<String> {
        let path = self.dir.path().join(SHARED).join(UPLOAD);
        let what = || format!("cannot write {}", path.display());
        let mut file = File::create(&path).context(what)?;
        let noise = image::noise();
        (0..mib)
            .try_for_each(|_| file.write_all(&noise))
            .context(what)?;
        // Mounted anew: what was read of an earlier file is not to be taken for this one.
        let script = format!(
            "mkdir -p /tmp/host; mount -t hostfs none /tmp/host
             {{ {script}
             }} </tmp/host/{UPLOAD}
             umount /tmp/host"
        );
        let text = self.check(&script, timeout)?;
        fs::remove_file(&path).context(what)?;
        Ok(text)
    }

    /// Powers it off and waits for its end.
    ///
    /// # Errors
    /// When it does not end, or ends with a failure.
    pub fn end(mut self) -> Result<()> {
        let script = "(sleep 0.1; poweroff -f) >/dev/null 2>&1 &";
        let asked = self.hosted.check(script, Duration::from_secs(30));
        let console = self.hosted.console().clone();
        match self.hosted.end() {
            // It may be gone before it has answered.
            Ok(()) => Ok(()),
            // Its process has ended already, or aborts after that now and then. The console's last lines may come later.
            Err(Error::Program { .. }) if console.wait_for(HALTED, 0, LAST_LINES).is_ok() => Ok(()),
            Err(error) => asked.and(Err(error)),
        }
    }
}

/// The program and its arguments.
fn words(spec: &Spec, dir: &Path) -> Result<Vec<String>> {
    let memory = spec.memory.unwrap_or(MEMORY) >> 20;
    // `s`: every write is durable before it ends.
    let flag = match spec.cache {
        Cache::None => "s",
        Cache::Writeback => "",
    };
    let mut words = vec![host::program(PROGRAM)?.to_string_lossy().into_owned()];
    words.extend([
        format!("mem={memory}M"),
        format!("initrd={}", dir.join("initramfs").display()),
        "rdinit=/init".into(),
        format!("ubd0{flag}={}", spec.image.display()),
        "con=null".into(),
        "con0=null,fd:1".into(),
        "ssl=null".into(),
        format!("ssl0=fd:{AGENT}"),
        "lab_line=/dev/ttyS0".into(),
        format!("hostfs={}", dir.join(SHARED).display()),
        format!("uml_dir={}", dir.display()),
        "umid=lab".into(),
        "quiet".into(),
    ]);
    Ok(words)
}

/// Fails on a machine whose CPU has registers that user-mode Linux knows nothing of.
///
/// # Errors
/// One line.
pub fn check_cpu() -> Result<()> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    match has_amx(&cpuinfo) {
        true => Err(Error::Protocol(AMX.into())),
        false => Ok(()),
    }
}

fn has_amx(cpuinfo: &str) -> bool {
    let mut flags = cpuinfo.lines().filter(|line| line.starts_with("flags"));
    flags.any(|line| line.split_whitespace().any(|flag| flag == "amx_tile"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_with_amx_are_known() {
        let flags = "model name\t: amx_tile\nflags\t\t: fpu";
        assert!(!has_amx(flags));
        assert!(has_amx(&format!("{flags} amx_bf16 amx_tile amx_int8\n")));
    }

    #[test]
    fn a_kernel_that_panics_says_so_at_once() {
        if check_cpu().is_err() {
            return; // it panics by itself: the test of beds that run has that
        }
        let dir = Scratch::small().unwrap();
        let image = dir.path().join("image");
        crate::disk_image::sparse(&image, 1 << 20).unwrap();
        let mut words = words(&Spec::new(&image), dir.path()).unwrap();
        words.retain(|word| !word.starts_with("initrd="));
        fs::create_dir(dir.path().join(SHARED)).unwrap();
        let error = Hosted::start("user-mode Linux", &words, Vec::new(), dir.path());
        let said = error.unwrap_err().to_string();
        assert!(said.starts_with("user-mode Linux failed"), "{said}");
        assert!(said.contains("Kernel panic - not syncing"), "{said}");
    }

    #[test]
    fn a_disk_past_the_cache_is_written_at_once() {
        let image = Path::new("/i");
        let mut spec = Spec::new(image);
        let line = |spec: &Spec| words(spec, Path::new("/d")).unwrap().join(" ");
        spec.memory = Some(64 << 20);
        assert!(line(&spec).contains(" mem=64M ") && line(&spec).contains(" ubd0=/i "));
        spec.cache = Cache::None;
        assert!(line(&spec).contains(" ubd0s=/i "));
    }
}
