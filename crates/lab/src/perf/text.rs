//! Parses lines of `perf script`: a thread, or a frame of its stack.

use fathom_run::folded::frame;

/// Maximum length of a line in bytes. A longer line is cut.
const MAX_LINE: usize = 4096;
/// Maximum number of modules of a kernel.
const MOST_MODULES: usize = 10_000;
/// Lowest address of the kernel on x86-64.
const KERNEL: u64 = 1 << 63;
const UNKNOWN: &str = "[unknown]";

/// Splits a stream of chunks into lines.
#[derive(Debug, Default)]
pub struct Text {
    line: Vec<u8>,
}

impl Text {
    /// Appends a chunk, and passes each line that the chunk completes to `line`.
    pub fn push(&mut self, chunk: &[u8], line: &mut dyn FnMut(&str)) {
        for &byte in chunk {
            match byte {
                b'\n' => self.end(line),
                _ if self.line.len() < MAX_LINE => self.line.push(byte),
                _ => {}
            }
        }
    }

    /// Passes the last, incomplete line to `line`.
    pub fn end(&mut self, line: &mut dyn FnMut(&str)) {
        let bytes = std::mem::take(&mut self.line);
        line(&String::from_utf8_lossy(&bytes));
    }
}

/// The first line of a sample.
#[derive(Debug, PartialEq)]
pub struct Head<'a> {
    pub comm: &'a str,
    pub pid: u32,
    pub tid: u32,
    pub rest: &'a str,
}

impl Head<'_> {
    /// Finds `1234/1240` (pid/tid). The command before it may have blanks and digits.
    pub fn parse(line: &str) -> Option<Head<'_>> {
        let is_blank = |(_, c): &(usize, char)| *c == ' ';
        let ends = line.char_indices().filter(is_blank).map(|(at, _)| at);
        ends.chain([line.len()]).find_map(|end| {
            let begin = line[..end].rfind(' ').map_or(0, |at| at + 1);
            let (pid, tid) = line[begin..end].split_once('/')?;
            Some(Head {
                comm: line[..begin].trim(),
                pid: pid.parse().ok()?,
                tid: tid.parse().ok()?,
                rest: line[end..].trim(),
            })
        })
    }
}

/// A kernel's modules from /proc/modules. perf 6.1 attributes their functions to the kernel itself.
#[derive(Clone, Debug, Default)]
pub struct Modules {
    /// (start address, end address, name) of each module.
    list: Vec<(u64, u64, String)>,
}

impl Modules {
    /// Parses lines such as `virtio_blk 28672 1 - Live 0xffffffffc044b000`. Without the permission
    /// to see addresses, they are zero and the module is skipped.
    pub fn parse(text: &str) -> Modules {
        let module = |line: &str| {
            let mut words = line.split_whitespace();
            let (name, size) = (words.next()?, words.next()?.parse::<u64>().ok()?);
            let from = words.nth(3)?.trim_start_matches("0x");
            let from = u64::from_str_radix(from, 16).ok()?;
            (from >= KERNEL).then(|| (from, from.saturating_add(size), name.to_owned()))
        };
        let list = text.lines().filter_map(module).take(MOST_MODULES);
        Modules {
            list: list.collect(),
        }
    }

    /// Reads the modules of the kernel of this machine.
    pub fn of_host() -> Modules {
        let text = std::fs::read_to_string("/proc/modules"); // missing on a kernel without modules
        Modules::parse(&text.unwrap_or_default())
    }

    /// Converts `ffffffff81a0b0c0 vfs_read ([kernel.kallsyms])` to `vfs_read [kernel]`.
    pub fn frame(&self, text: &str) -> Option<String> {
        let (address, rest) = text.trim().split_once(' ')?;
        let address = u64::from_str_radix(address, 16).ok()?;
        let rest = rest.trim_end();
        let rest = rest.strip_suffix(" (deleted))").unwrap_or(rest);
        let (symbol, object) = rest.rsplit_once(" (").unwrap_or((rest, UNKNOWN));
        let symbol = symbol.trim();
        let object = self.object(object.strip_suffix(')').unwrap_or(object), address);
        let symbol = if symbol.is_empty() { UNKNOWN } else { symbol };
        Some(frame(symbol, &object))
    }

    /// Returns the object's name. The kernel and its modules get names that no program's file has;
    /// for files, it is the last part of the path.
    fn object(&self, object: &str, address: u64) -> String {
        let file = object.rsplit('/').next().unwrap_or(object);
        let bare = file.trim_start_matches('[').trim_end_matches(']');
        if address < KERNEL {
            return match bare {
                "" => "unknown".into(),
                // Code that was generated at run time without a map file, such as that of an
                // emulated guest.
                map if map.starts_with("perf-") && map.ends_with(".map") => "anon".into(),
                name => name.to_owned(),
            };
        }
        let within = |(from, to, _): &&(u64, u64, String)| (*from..*to).contains(&address);
        match bare.split('.').next().unwrap_or(bare) {
            "kernel" | "guest" | "vmlinux" | "kcore" | "unknown" | "" => {
                let module = self.list.iter().find(within);
                module.map_or("kernel".into(), |(_, _, name)| format!("{name}.ko"))
            }
            module => format!("{module}.ko"),
        }
    }
}
