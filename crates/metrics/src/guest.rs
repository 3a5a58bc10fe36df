//! Identifies the virtual machine of a front-end by its process's arguments.

use super::samples::Label;
use std::fs::File;
use std::io::Read;

/// The identity of a virtual machine, as far as known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guest {
    pid: String,
    /// The name of the program.
    vmm: Option<String>,
    name: Option<String>,
    uuid: Option<String>,
}

/// Maximum bytes of a process's arguments to read; the relevant ones come early.
const MAX: u64 = 64 << 10;

/// Maximum number of characters of a label, whose value the guest's owner may choose.
const MAX_LABEL: usize = 128;

impl Guest {
    /// Returns a guest of which only the process ID is known.
    pub fn unknown(pid: i32) -> Guest {
        Guest {
            pid: pid.to_string(),
            ..Guest::default()
        }
    }

    /// Reads the arguments of a process. `pid` is zero if the process is not visible from here.
    ///
    /// The process can delay this call for any time.
    pub fn of(pid: i32) -> Guest {
        let mut arguments = Vec::new();
        if let Ok(file) = File::open(format!("/proc/{pid}/cmdline")) {
            // Arguments that cannot be read remain unknown.
            let _ = file.take(MAX).read_to_end(&mut arguments);
        }
        let arguments = String::from_utf8_lossy(&arguments);
        let arguments: Vec<_> = arguments.split('\0').collect();
        Guest {
            pid: pid.to_string(),
            ..Guest::by(&arguments)
        }
    }

    fn by(arguments: &[&str]) -> Guest {
        let short = |value: &str| value.chars().take(MAX_LABEL).collect::<String>();
        let after = |option: &str| {
            let at = arguments.iter().position(|argument| *argument == option)?;
            arguments
                .get(at + 1)
                .copied()
                .filter(|value| !value.is_empty())
        };
        let vmm = arguments.first().and_then(|path| path.rsplit('/').next());
        // QEMU's `-name guest=NAME,...` or `-name NAME`, and Firecracker's `--id`.
        let name = after("-name").or_else(|| after("--id")).map(|name| {
            let first = name.split(',').next().unwrap_or(name);
            first.strip_prefix("guest=").unwrap_or(first)
        });
        Guest {
            pid: String::new(),
            vmm: vmm.filter(|vmm| !vmm.is_empty()).map(short),
            name: name.map(short),
            uuid: after("-uuid").map(short),
        }
    }

    pub fn labels(&self) -> Vec<Label<'_>> {
        let known = [
            ("vmm", &self.vmm),
            ("guest", &self.name),
            ("uuid", &self.uuid),
        ];
        let known = known
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_deref()?)));
        [("pid", &*self.pid)].into_iter().chain(known).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_known_by_their_arguments() {
        let libvirt = [
            "/usr/bin/qemu-system-x86_64",
            "-name",
            "guest=web,debug-threads=on",
            "-S",
            "-uuid",
            "4dea22b3-1d52-d8f3-2516-782e98ab3fa0",
            "",
        ];
        let guest = Guest::by(&libvirt);
        assert_eq!(
            guest.labels()[1..],
            [
                ("vmm", "qemu-system-x86_64"),
                ("guest", "web"),
                ("uuid", "4dea22b3-1d52-d8f3-2516-782e98ab3fa0")
            ]
        );
        assert_eq!(
            Guest::by(&["qemu", "-name", "a,process=b"]).name.as_deref(),
            Some("a")
        );
        assert_eq!(
            Guest::by(&["firecracker", "--id", "vm7"]).name.as_deref(),
            Some("vm7")
        );
        assert_eq!(Guest::by(&["qemu", "-name"]).name, None);
        assert_eq!(Guest::by(&[""]), Guest::default());
        let long = "x".repeat(1000);
        assert_eq!(
            Guest::by(&["q", "-name", &long]).name.unwrap().len(),
            MAX_LABEL
        );
    }

    #[test]
    fn a_process_that_is_not_there_has_nothing_but_its_number() {
        assert_eq!(Guest::of(0).labels(), [("pid", "0")]);
    }
}
