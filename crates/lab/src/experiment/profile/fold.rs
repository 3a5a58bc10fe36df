//! Folds the text of `perf script` as it arrives, from perf in a guest or on the host.
//!
//! With call graphs, a sample is a line with the thread, a line for each frame from the innermost
//! to the outermost, and an empty line. Without call graphs, a sample is one line:
//!
//! ```text
//! CPU 0/KVM  1234/1240 K
//!         ffffffff81a0b0c0 vfs_read ([kernel.kallsyms])
//!             7f00a1b2c3d4 read (/usr/lib/x86_64-linux-gnu/libc.so.6)
//!
//! ```

use fathom_run::Folded;

use crate::perf::{Head, Modules, Text};

/// Fields that `perf script` prints.
pub const FIELDS: &str = "comm,pid,tid,misc,ip,sym,dso";

/// Maximum number of frames of a sample.
const MAX_FRAMES: usize = 256;
/// Frame for the time of a vCPU in its guest. The frames of the guest are not known on the host.
pub const IN_GUEST: &str = "[guest]";
/// Name for threads of QEMU if the thread is not known.
const VCPUS: &str = "vCPUs";

/// A process ID, and a prefix for the names of the process's threads.
pub type Known = (u32, &'static str);

/// Converts text to stacks.
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
    /// From the innermost to the outermost.
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

    /// Returns the stacks of the whole text. Idle CPUs are left out.
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
            // Repeated frames count once: a call chain through code without frame pointers often
            // repeats a frame.
            if sample.frames.last() != Some(&frame) {
                sample.frames.push(frame);
            }
        }
    }

    fn command(&self, head: &Head) -> String {
        let known = self.known.iter().find(|(pid, _)| *pid == head.pid);
        // perf does not know the thread of a sample in a guest, and prints `:` and the process ID.
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
        // A sample without a frame was cut off.
        if sample.frames.is_empty() || (sample.is_idle_task && is_idle(&sample.frames)) {
            return;
        }
        let frames = sample.frames.iter().rev().map(String::as_str);
        let command = std::iter::once(sample.command.as_str());
        self.folded.add(command.chain(frames), 1);
    }
}

/// Whether the CPU was idle. Interrupts are work, also in the idle task.
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
        // Without a call graph, it is not known why the function was called.
        [innermost] => begins(innermost, &WAITING),
        several => !several.iter().any(|frame| begins(frame, &INTERRUPTS)),
    }
}

/// Returns whether the CPU ran a guest's instructions, and the text after the mode letters.
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
