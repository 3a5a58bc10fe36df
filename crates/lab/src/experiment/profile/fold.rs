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

use crate::perf::{Head, Modules, Text};

/// What `perf script` is to print, and in which form.
pub const FIELDS: &str = "comm,pid,tid,misc,ip,sym,dso";

/// Of a sample.
const MAX_FRAMES: usize = 256;
/// The time of a virtual CPU in its guest, which has frames of its own there.
pub const IN_GUEST: &str = "[guest]";
/// Threads of QEMU, when it is not known which.
const VCPUS: &str = "vCPUs";

/// A process whose threads are told from those of others by a word before their names.
pub type Known = (u32, &'static str);

/// Text on its way to stacks.
#[derive(Debug, Default)]
pub struct Folder {
    text: Text,
    stacks: Stacks,
}

#[derive(Debug, Default)]
struct Stacks {
    known: Vec<Known>,
    modules: Modules,
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
    pub fn new(known: Vec<Known>, modules: Modules) -> Folder {
        let stacks = Stacks {
            known,
            modules,
            ..Stacks::default()
        };
        Folder {
            text: Text::default(),
            stacks,
        }
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, chunk: &[u8]) {
        self.text.push(chunk, &mut |line| self.stacks.line(line));
    }

    /// The stacks of all that has come. CPUs that were idle have none.
    pub fn finish(mut self) -> Folded {
        self.text.end(&mut |line| self.stacks.line(line));
        self.stacks.close();
        self.stacks.folded
    }
}

impl Stacks {
    fn line(&mut self, line: &str) {
        if line.trim().is_empty() {
            return self.close();
        }
        let head = match line.starts_with('\t') {
            true => None,
            false => Head::parse(line),
        };
        if let Some(head) = head {
            self.close();
            let (is_guest, rest) = mode(head.rest);
            let mut frames = Vec::new();
            match is_guest {
                true => frames.push(IN_GUEST.to_owned()),
                false => frames.extend(self.modules.frame(rest)),
            }
            self.sample = Some(Sample {
                command: self.command(&head),
                is_idle_task: head.tid == 0,
                frames,
            });
        } else if let Some(sample) = &mut self.sample
            && sample.frames.len() < MAX_FRAMES
            && sample.frames.first().is_none_or(|one| one != IN_GUEST)
            && let Some(frame) = self.modules.frame(line)
        {
            // One that calls itself is one, since a chain that goes through code without frame
            // pointers looks like that.
            if sample.frames.last() != Some(&frame) {
                sample.frames.push(frame);
            }
        }
    }

    fn command(&self, head: &Head) -> String {
        let known = self.known.iter().find(|(pid, _)| *pid == head.pid);
        // Of samples in a guest perf knows no thread, and says `:` and the process.
        let comm = match head.comm.starts_with(':') {
            true => VCPUS,
            false => head.comm,
        };
        format!("{}{comm}", known.map_or("", |(_, prefix)| prefix))
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

/// Whether the CPU ran a guest's instructions, and what is behind the letters that say so.
fn mode(text: &str) -> (bool, &str) {
    let letters = text.split(' ').next().unwrap_or_default();
    let is_mode = |c| matches!(c, 'K' | 'U' | 'H' | 'G' | 'g');
    match letters.chars().all(is_mode) {
        true => (letters.contains(['G', 'g']), &text[letters.len()..]),
        false => (false, text),
    }
}

#[cfg(test)]
mod tests;
