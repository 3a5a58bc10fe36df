//! Folds the text of `perf script` while it comes: of a guest's perf or of the host's.
//!
//! With call graphs a sample is a line with the thread, then a line for each frame from the inside
//! out, then an empty line; without, it is one line:
//!
//! ```text
//! CPU 0/KVM  1234/1240 K
//!         ffffffff81a0b0c0 vfs_read ([kernel.kallsyms])
//!             7f00a1b2c3d4 read (/usr/lib/x86_64-linux-gnu/libc.so.6)
//!
//! ```

use fathom_run::Folded;
use fathom_run::folded::frame;

/// What `perf script` is to print, and in which form.
pub const FIELDS: &str = "comm,pid,tid,misc,ip,sym,dso";

/// Of a line; what is longer is cut.
const MAX_LINE: usize = 4096;
/// Of a sample.
const MAX_FRAMES: usize = 256;
/// Where the kernel lies on x86-64.
const KERNEL: u64 = 1 << 63;
/// The time of a virtual CPU in its guest, which has frames of its own there.
pub const IN_GUEST: &str = "[guest]";
const UNKNOWN: &str = "[unknown]";

/// A process whose threads are told from those of others by a word before their names.
pub type Known = (u32, &'static str);

/// Text on its way to stacks.
#[derive(Debug, Default)]
pub struct Folder {
    known: Vec<Known>,
    line: Vec<u8>,
    sample: Option<Sample>,
    folded: Folded,
}

#[derive(Debug)]
struct Sample {
    command: String,
    is_idle_task: bool,
    /// From the inside out.
    frames: Vec<String>,
}

impl Folder {
    pub fn new(known: Vec<Known>) -> Folder {
        Folder {
            known,
            ..Folder::default()
        }
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, chunk: &[u8]) {
        for &byte in chunk {
            match byte {
                b'\n' => self.end_line(),
                _ if self.line.len() < MAX_LINE => self.line.push(byte),
                _ => {}
            }
        }
    }

    /// The stacks of all that has come. CPUs that were idle have none.
    pub fn finish(mut self) -> Folded {
        self.end_line();
        self.close();
        self.folded
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        if line.trim().is_empty() {
            return self.close();
        }
        let head = match line.starts_with('\t') {
            true => None,
            false => Head::parse(&line),
        };
        if let Some(head) = head {
            self.close();
            let mut frames = Vec::new();
            match head.is_guest {
                true => frames.push(IN_GUEST.to_owned()),
                false => frames.extend(parse_frame(head.rest)),
            }
            self.sample = Some(Sample {
                command: self.command(&head),
                is_idle_task: head.tid == 0,
                frames,
            });
        } else if let Some(sample) = &mut self.sample
            && sample.frames.len() < MAX_FRAMES
            && sample.frames.first().is_none_or(|one| one != IN_GUEST)
            && let Some(frame) = parse_frame(&line)
        {
            // A chain that goes through code without frame pointers is noise.
            let is_noise = frame.starts_with(UNKNOWN) && sample.frames.last() == Some(&frame);
            if !is_noise {
                sample.frames.push(frame);
            }
        }
    }

    fn command(&self, head: &Head) -> String {
        let known = self.known.iter().find(|(pid, _)| *pid == head.pid);
        format!("{}{}", known.map_or("", |(_, prefix)| prefix), head.comm)
    }

    fn close(&mut self) {
        let Some(sample) = self.sample.take() else {
            return;
        };
        // What has no frame is a sample that was cut off.
        if sample.frames.is_empty() || (sample.is_idle_task && is_idle(&sample.frames)) {
            return;
        }
        let frames = sample.frames.iter().rev().map(String::as_str);
        let command = std::iter::once(sample.command.as_str());
        self.folded.add(command.chain(frames), 1);
    }
}

/// Whether this is a CPU that waits; interrupts are work also of the idle task.
fn is_idle(frames: &[String]) -> bool {
    const INTERRUPTS: [&str; 5] = [
        "asm_",
        "irq_exit",
        "__irq_exit",
        "__do_softirq",
        "handle_softirqs",
    ];
    const WAITING: [&str; 8] = [
        "pv_native_safe_halt",
        "native_safe_halt",
        "default_idle",
        "intel_idle",
        "acpi_",
        "mwait_idle",
        "cpuidle_",
        "poll_idle",
    ];
    let begins = |frame: &String, with: &[&str]| with.iter().any(|one| frame.starts_with(one));
    match frames {
        // Without a call graph nothing says what the function was called for.
        [innermost] => begins(innermost, &WAITING),
        several => !several.iter().any(|frame| begins(frame, &INTERRUPTS)),
    }
}

/// A sample's first line.
#[derive(Debug, PartialEq)]
struct Head<'a> {
    comm: &'a str,
    pid: u32,
    tid: u32,
    /// The CPU ran a guest's instructions.
    is_guest: bool,
    /// The frame, where there is no call graph.
    rest: &'a str,
}

impl Head<'_> {
    /// Finds `1234/1240`: a command may have blanks, and digits.
    fn parse(line: &str) -> Option<Head<'_>> {
        let is_blank = |(_, c): &(usize, char)| *c == ' ';
        let ends = line.char_indices().filter(is_blank).map(|(at, _)| at);
        ends.chain([line.len()]).find_map(|end| {
            let begin = line[..end].rfind(' ').map_or(0, |at| at + 1);
            let (pid, tid) = line[begin..end].split_once('/')?;
            let (pid, tid) = (pid.parse().ok()?, tid.parse().ok()?);
            let rest = line[end..].trim_start();
            let is_mode = |c| matches!(c, 'K' | 'U' | 'H' | 'G' | 'g');
            let modes = rest.split(' ').next()?;
            let modes = if modes.chars().all(is_mode) {
                modes
            } else {
                ""
            };
            Some(Head {
                comm: line[..begin].trim(),
                pid,
                tid,
                is_guest: modes.contains(['G', 'g']),
                rest: rest[modes.len()..].trim(),
            })
        })
    }
}

/// `ffffffff81a0b0c0 vfs_read ([kernel.kallsyms])` as `vfs_read [kernel]`.
fn parse_frame(text: &str) -> Option<String> {
    let (address, rest) = text.trim().split_once(' ')?;
    let address = u64::from_str_radix(address, 16).ok()?;
    let rest = rest.trim_end();
    let rest = rest.strip_suffix(" (deleted))").unwrap_or(rest);
    let (symbol, object) = rest.rsplit_once(" (").unwrap_or((rest, UNKNOWN));
    let symbol = symbol.trim();
    let object = object_name(object.strip_suffix(')').unwrap_or(object), address);
    let symbol = if symbol.is_empty() { UNKNOWN } else { symbol };
    Some(frame(symbol, &object))
}

/// The kernel and its modules by names that no program's file has; of files the last part.
fn object_name(object: &str, address: u64) -> String {
    let file = object.rsplit('/').next().unwrap_or(object);
    let bare = file.trim_start_matches('[').trim_end_matches(']');
    let name = match address >= KERNEL {
        // Code that was made at run time, of which nobody has left a map: an emulated guest's, say.
        false if bare.starts_with("perf-") && bare.ends_with(".map") => "anon",
        false => bare,
        true => match bare.split('.').next().unwrap_or(bare) {
            "kernel" | "guest" | "vmlinux" | "kcore" | "unknown" => "kernel",
            module => return format!("{module}.ko"),
        },
    };
    match name {
        "" => "unknown".into(),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests;
