//! The description of this machine in a run's environment block.

use std::fs;
use std::path::Path;

use fathom_run::{Environment, Machine};

use crate::host::{self, Accelerator};

const CLOCK_SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";

/// Returns the environment of a run: this machine and the version of this program.
pub fn here(trace_clock: &str) -> Environment {
    Environment {
        host: machine(trace_clock),
        fathom: env!("CARGO_PKG_VERSION").into(),
        stretched: is_stretched(),
        ..Environment::default()
    }
}

/// Returns the same environment with the accelerator and version of QEMU.
pub fn with_guests() -> Environment {
    let version = host::qemu_version().ok();
    Environment {
        accelerator: Accelerator::detect().name().into(),
        qemu: version.map(|(major, minor)| format!("{major}.{minor}")),
        ..here("")
    }
}

/// Describes this machine. `trace_clock` is the clock of its trace events.
pub fn machine(trace_clock: &str) -> Machine {
    let read = |path: &str| {
        fs::read_to_string(path)
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let cpuinfo = read("/proc/cpuinfo");
    Machine {
        kernel: read("/proc/sys/kernel/osrelease"),
        cpu: cpu_model(&cpuinfo).unwrap_or("unknown").to_owned(),
        cpus: u32::try_from(cpu_count(&cpuinfo)).unwrap_or(u32::MAX),
        clock_source: read(CLOCK_SOURCE),
        trace_clock: trace_clock.to_owned(),
    }
}

/// Returns whether this machine is itself emulated: its times are then stretched, and unevenly.
pub fn is_stretched() -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpu_model(&cpuinfo).is_some_and(|model| model.contains("TCG"))
}

/// Returns whether a folder's file system is in memory, where direct I/O measures nothing.
pub fn is_in_memory(dir: &Path) -> bool {
    /// TMPFS_MAGIC and RAMFS_MAGIC of linux/magic.h.
    const MEMORY: &[i64] = &[0x0102_1994, 0x8584_58f6];
    rustix::fs::statfs(dir).is_ok_and(|stat| MEMORY.contains(&stat.f_type))
}

fn cpu_model(cpuinfo: &str) -> Option<&str> {
    let line = cpuinfo
        .lines()
        .find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim())
}

fn cpu_count(cpuinfo: &str) -> usize {
    let lines = cpuinfo.lines();
    lines.filter(|line| line.starts_with("processor")).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpuinfo_tells_model_and_count() {
        let text = "processor\t: 0\nmodel name\t: QEMU TCG CPU version 2.5+\nflags\t: fpu\n\n\
                    processor\t: 1\nmodel name\t: QEMU TCG CPU version 2.5+\n";
        assert_eq!(cpu_model(text), Some("QEMU TCG CPU version 2.5+"));
        assert_eq!(cpu_count(text), 2);
        assert_eq!(cpu_model(""), None);
    }

    #[test]
    fn this_machine_is_described() {
        let machine = machine("x86-tsc");
        let uname = crate::host::run("uname", &["-r"]).unwrap();
        assert_eq!(machine.kernel, uname.trim());
        assert!(machine.cpus > 0 && !machine.clock_source.is_empty());
    }

    #[test]
    fn shared_memory_is_in_memory() {
        assert!(is_in_memory(Path::new("/dev/shm")));
        assert!(!is_in_memory(Path::new("/proc")));
    }
}
