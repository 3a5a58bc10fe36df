//! User-mode Linux: a kernel that is a process of this machine. The kernel's disk is a `ubd`
//! device, the agent uses a serial line, and uploaded data are in a file of this machine (hostfs).
//!
//! Serial lines carry only short texts: a line whose buffers are full may block forever (Linux
//! 6.1).

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

/// Debian's name of the program.
pub const PROGRAM: &str = "linux.uml";
/// Path of the disk under test inside.
pub const DISK: &str = "/dev/ubda";
/// Maximum length of a script in bytes. In base64, with some margin, it fits a line's buffer (4
/// KiB).
const MAX_SCRIPT: usize = 2500;
/// The folder that is visible inside, and its files.
const SHARED: &str = "shared";
const UPLOAD: &str = "upload";
const PRINTED: &str = "printed";
const MEMORY: u64 = 256 << 20;
/// Last kernel message after a complete shutdown.
const HALTED: &str = "reboot: System halted";
/// Time for the console's last lines to be read after the process has ended.
const LAST_LINES: Duration = Duration::from_secs(5);
/// Kernel message if the host's CPU has more registers than the kernel knows.
const REGISTERS: &str = "ptrace set fp regs failed";
const AMX: &str = "user-mode Linux cannot run here: it knows nothing of the AMX registers that this \
     machine's CPU has, and panics at its first process; leave out --bed uml";

/// A booted kernel, which is killed on drop.
#[derive(Debug)]
pub struct Uml {
    // Fields are dropped in order: the kernel must end before its directory is removed.
    pub hosted: Hosted,
    dir: Scratch,
}

impl Uml {
    /// Boots the kernel.
    ///
    /// # Errors
    /// When the kernel does not boot; the error has its last messages.
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

    /// Runs a shell script that must succeed and returns its output.
    ///
    /// # Errors
    /// When the agent does not respond, or the script is too long, fails or does not end in time.
    pub fn check(&mut self, script: &str, timeout: Duration) -> Result<String> {
        match script.len() > MAX_SCRIPT {
            true => Err(Error::Protocol(format!(
                "a script in user-mode Linux has at most {MAX_SCRIPT} bytes, and not {}",
                script.len()
            ))),
            false => self.hosted.check(script, timeout),
        }
    }

    /// Like [`check`](Self::check), for a script whose output exceeds a line's buffer. The output
    /// goes to a file of this machine.
    ///
    /// # Errors
    /// Those of [`check`](Self::check).
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

    /// Like [`check`](Self::check), for a script that gets `mib` MiB on its standard input.
    ///
    /// # Errors
    /// Those of [`check`](Self::check), and when the file cannot be written.
    pub fn upload(&mut self, mib: u64, script: &str, timeout: Duration) -> Result<String> {
        let path = self.dir.path().join(SHARED).join(UPLOAD);
        let what = || format!("cannot write {}", path.display());
        let mut file = File::create(&path).context(what)?;
        let noise = image::noise();
        (0..mib)
            .try_for_each(|_| file.write_all(&noise))
            .context(what)?;
        // A new mount for each upload, so that no cached data of an earlier file are read.
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

    /// Powers the kernel off and waits for its end.
    ///
    /// # Errors
    /// When the process does not end, or fails.
    pub fn end(mut self) -> Result<()> {
        let script = "(sleep 0.1; poweroff -f) >/dev/null 2>&1 &";
        let asked = self.hosted.check(script, Duration::from_secs(30));
        let console = self.hosted.console().clone();
        match self.hosted.end() {
            // The process may exit before the agent responds.
            Ok(()) => Ok(()),
            // The process has already exited, or sometimes aborts after the shutdown. The console's
            // last lines may arrive later.
            Err(Error::Program { .. }) if console.wait_for(HALTED, 0, LAST_LINES).is_ok() => Ok(()),
            Err(error) => asked.and(Err(error)),
        }
    }
}

/// Returns the program and its arguments.
fn words(spec: &Spec, dir: &Path) -> Result<Vec<String>> {
    let memory = spec.memory.unwrap_or(MEMORY) >> 20;
    // `s`: each write is synchronous.
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

/// Fails if this machine's CPU has registers that user-mode Linux does not know.
///
/// # Errors
/// When the CPU has AMX.
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
            return; // without AMX support it panics by itself; the tests of beds cover that
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
