//! Folded stacks: sampled stacks with their counts.
//!
//! The format is Brendan Gregg's, which flame graph tools read: one line `comm;outer;inner count`
//! per stack. A frame is a symbol followed by its object in brackets: `vfs_read [kernel]`,
//! `virtblk_done [virtio_blk.ko]`, `memcpy [libc.so.6]`.
//!
//! Names and files are not trusted, so the size of both is bounded.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cell::{CELLS, Planned};
use crate::error::{Error, Result};
use crate::open::open_within;

/// Maximum number of different frames.
const MOST_NAMES: usize = 50_000;
/// Maximum number of different stacks.
const MOST_STACKS: usize = 100_000;
/// Maximum number of frames of a stack; of a deeper stack, the command and the inner frames are
/// kept.
const MOST_DEPTH: usize = 128;
/// Maximum number of characters of a frame, of its symbol, and of its object.
const MOST_NAME: usize = 200;
const MOST_SYMBOL: usize = 150;
const MOST_OBJECT: usize = 40;
/// Maximum count of one stack, so that sums do not overflow.
const MOST_SAMPLES: u64 = 1 << 40;
/// Maximum size of a file in bytes.
const MAX_BYTES: u64 = 256 << 20;
const MAX_LINE: u64 = 64 << 10;

/// Frame that replaces frames and stacks beyond the limits.
pub const OTHERS: &str = "[others]";
/// Prefix for names of QEMU's threads, which may be arbitrary.
pub const QEMU: &str = "qemu: ";
/// Prefix for names of threads of the disk's server.
pub const SERVER: &str = "server: ";

/// The machine where stacks were sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// Guest's kernel and programs.
    Guest,
    /// Host's kernel and programs, which include QEMU and the server.
    Host,
}

impl Side {
    /// Both sides.
    pub const ALL: [Side; 2] = [Side::Guest, Side::Host];

    /// Returns the name of the side.
    pub fn name(self) -> &'static str {
        match self {
            Side::Guest => "guest",
            Side::Host => "host",
        }
    }

    /// Returns the name of the side's file in a cell's folder.
    pub fn file(self) -> String {
        format!("{}.folded", self.name())
    }
}

/// Stacks and their counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Folded {
    names: Vec<Box<str>>,
    numbers: HashMap<Box<str>, u32>,
    stacks: HashMap<Box<[u32]>, u64>,
}

impl Folded {
    /// Counts a stack: the command, then the frames from the outermost to the innermost.
    pub fn add<'a>(&mut self, stack: impl IntoIterator<Item = &'a str>, count: u64) {
        let mut numbers: Vec<u32> = Vec::new();
        for name in stack {
            if numbers.len() == MOST_DEPTH {
                numbers.remove(1);
            }
            numbers.push(self.number(name));
        }
        if numbers.is_empty() || count == 0 {
            return;
        }
        if self.stacks.len() >= MOST_STACKS && !self.stacks.contains_key(&numbers[..]) {
            // This one name is accepted even if the tables of names and stacks are full.
            numbers = vec![self.number(OTHERS)];
        }
        let seen = self.stacks.entry(numbers.into_boxed_slice()).or_default();
        *seen = seen.saturating_add(count).min(MOST_SAMPLES);
    }

    fn number(&mut self, name: &str) -> u32 {
        let name = sound(name);
        if let Some(&number) = self.numbers.get(&*name) {
            return number;
        }
        if self.names.len() >= MOST_NAMES && name != OTHERS {
            return self.number(OTHERS);
        }
        let number = self.names.len() as u32;
        let name = name.into_boxed_str();
        self.names.push(name.clone());
        self.numbers.insert(name, number);
        number
    }

    /// Adds the stacks of another value.
    pub fn merge(&mut self, other: &Folded) {
        for (stack, count) in other.stacks() {
            self.add(stack, count);
        }
    }

    /// Returns all stacks with their counts, in no particular order.
    pub fn stacks(&self) -> impl Iterator<Item = (Vec<&str>, u64)> {
        let name = |&number: &u32| self.names.get(number as usize).map_or(OTHERS, |name| name);
        let stacks = self.stacks.iter();
        stacks.map(move |(stack, count)| (stack.iter().map(name).collect(), *count))
    }

    /// Returns the total number of samples.
    pub fn total(&self) -> u64 {
        self.stacks
            .values()
            .fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// Returns true if no stack was counted.
    pub fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }

    /// Returns the stacks for whose command `is_wanted` returns true.
    #[must_use]
    pub fn filter(&self, is_wanted: impl Fn(&str) -> bool) -> Folded {
        let mut found = Folded::default();
        for (stack, count) in self.stacks() {
            if stack.first().is_some_and(|command| is_wanted(command)) {
                found.add(stack, count);
            }
        }
        found
    }

    /// Returns the sorted lines `comm;outer;inner count`.
    pub fn lines(&self) -> Vec<String> {
        let stacks = self.stacks();
        let lines = stacks.map(|(stack, count)| format!("{} {count}", stack.join(";")));
        let mut lines: Vec<String> = lines.collect();
        lines.sort_unstable();
        lines
    }

    /// Writes a file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let write = || {
            let mut file = BufWriter::new(File::create(path)?);
            for line in self.lines() {
                writeln!(file, "{line}")?;
            }
            file.flush()
        };
        write().map_err(Error::io(path))
    }

    /// Reads a cell's file; `None` if the file does not exist. Malformed lines are skipped.
    ///
    /// # Errors
    /// The file cannot be read, or does not lie in that folder.
    pub fn load(run: &Path, planned: &Planned, side: Side) -> Result<Option<Folded>> {
        let name = side.file();
        let path = planned.folder(run).join(&name);
        match open_within(run, &[CELLS, &planned.id], &name, MAX_BYTES) {
            Ok(file) => Folded::read(BufReader::new(file)).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
        .map_err(Error::io(&path))
    }

    fn read(mut text: impl BufRead) -> io::Result<Folded> {
        let (mut found, mut line) = (Folded::default(), Vec::new());
        loop {
            line.clear();
            if text.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
                return Ok(found);
            }
            let line = String::from_utf8_lossy(&line);
            if let Some((stack, count)) = line.trim_end().rsplit_once(' ')
                && let Ok(count) = count.parse()
            {
                found.add(stack.split(';'), count);
            }
        }
    }
}

/// Formats a frame from a symbol and its object.
pub fn frame(symbol: &str, object: &str) -> String {
    let clipped = |text: &str, most| text.chars().take(most).collect::<String>();
    let (symbol, object) = (clipped(symbol, MOST_SYMBOL), clipped(object, MOST_OBJECT));
    format!("{symbol} [{object}]")
}

/// Splits a frame into symbol and object; without an object, the whole frame is the symbol.
pub fn parts(frame: &str) -> (&str, &str) {
    let parts = frame
        .strip_suffix(']')
        .and_then(|text| text.rsplit_once(" ["));
    parts.unwrap_or((frame, ""))
}

/// Returns true if the object is the kernel or one of its modules.
pub fn is_kernel(object: &str) -> bool {
    object == "kernel" || object.ends_with(".ko")
}

/// Returns a name that does not break the format: bounded, not empty, and without `;` and control
/// characters.
fn sound(name: &str) -> String {
    let clean = |c: char| match c {
        ';' => ':',
        c if c.is_control() => '?',
        c => c,
    };
    let name: String = name.trim().chars().map(clean).take(MOST_NAME).collect();
    match name.is_empty() {
        true => "[unknown]".into(),
        false => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_are_counted_and_read_as_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        let planned = Planned {
            id: "1-1".into(),
            ..Planned::default()
        };
        let load = |side| Folded::load(dir.path(), &planned, side).unwrap();
        std::fs::create_dir_all(planned.folder(dir.path())).unwrap();
        assert_eq!(load(Side::Host), None);
        let mut folded = Folded::default();
        folded.add(["CPU 0/KVM", "ioctl [libc.so.6]", "kvm [kvm.ko]"], 3);
        folded.add(["CPU 0/KVM", "ioctl [libc.so.6]", "kvm [kvm.ko]"], 2);
        folded.add(["a;b\nc", ""], 1);
        let path = planned.folder(dir.path()).join("host.folded");
        folded.save(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            "CPU 0/KVM;ioctl [libc.so.6];kvm [kvm.ko] 5\na:b?c;[unknown] 1\n"
        );
        let read = load(Side::Host).unwrap();
        assert_eq!((read.lines(), read.total()), (folded.lines(), 6));
        assert_eq!(parts("kvm [kvm.ko]"), ("kvm", "kvm.ko"));
        assert_eq!(parts("[guest]"), ("[guest]", ""));
    }

    #[test]
    fn a_file_of_garbage_has_what_can_be_read_of_it() {
        let text = b"\xff\xfe;x 3\nno count\n 7\na;b -1\na;b 99999999999999999999\n\na;c 18446744073709551615\na;c 1";
        let read = Folded::read(&text[..]).unwrap();
        assert_eq!(
            read.lines(),
            ["[unknown] 7", "a;c 1099511627776", "\u{fffd}\u{fffd};x 3"]
        );
    }

    #[test]
    fn what_has_no_end_is_bounded() {
        let mut folded = Folded::default();
        for i in 0..MOST_STACKS + MOST_NAMES {
            folded.add([format!("{i}").as_str(), &"x".repeat(1000)], 1);
        }
        assert!(folded.names.len() <= MOST_NAMES + 1);
        assert!(folded.stacks.len() <= MOST_STACKS + 1);
        assert_eq!(folded.total(), (MOST_STACKS + MOST_NAMES) as u64);
        assert!(folded.names.iter().all(|name| name.len() <= MOST_NAME));
        let deep: Vec<String> = (0..1000).map(|i| i.to_string()).collect();
        let mut folded = Folded::default();
        folded.add(deep.iter().map(String::as_str), 1);
        let (stack, _) = folded.stacks().next().unwrap();
        assert_eq!(
            (stack.len(), stack[0], stack[127]),
            (MOST_DEPTH, "0", "999")
        );
        for i in 0..MOST_STACKS as u32 + 10 {
            let bits: Vec<&str> = (0..20)
                .map(|bit| ["a", "b"][(i >> bit & 1) as usize])
                .collect();
            folded.add(bits, 1);
        }
        assert!(folded.stacks.len() <= MOST_STACKS + 1);
        assert!(folded.lines().iter().any(|line| line.starts_with(OTHERS)));
    }
}
