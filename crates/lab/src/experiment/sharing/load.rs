//! What is done to the files, as scripts: the same in guests and on this machine.

use std::time::Duration;

use fathom_load::files::Report;
use fathom_units::short_duration;

use crate::error::{Error, Result};
use crate::words::words;
use crate::work::{Shape, Worked};

words! {
    /// What is done to the files.
    pub enum Test {
        /// A new file, from its start to its end, in 1 MiB; fsync ends it.
        Write = "write",
        /// The same file, read so.
        Read = "read",
        /// Blocks of 4 KiB anywhere in it, each once.
        RandomWrite = "random-write",
        RandomRead = "random-read",
        /// Many small files.
        Create = "create",
        Stat = "stat",
        Rename = "rename",
        Delete = "delete",
    }
}

impl Test {
    /// All of them.
    pub const FORM_AS_DEFAULT: &str =
        "write,read,random-write,random-read,create,stat,rename,delete";

    pub fn is_streaming(self) -> bool {
        matches!(self, Test::Write | Test::Read)
    }

    /// Whether it moves data, and not names.
    pub fn is_of_data(self) -> bool {
        self.is_streaming() || matches!(self, Test::RandomWrite | Test::RandomRead)
    }

    /// Whether its data has been written to the device when it has ended.
    pub fn is_flushed(self) -> bool {
        matches!(self, Test::Write | Test::RandomWrite)
    }
}

/// The file of the tests that move data.
pub const DATA: &str = "data";
const ONE: Shape = Shape {
    threads: 1,
    depth: 1,
};
/// What the slowest way is expected to do at least: bytes, and calls, in a second.
const SLOWEST: u64 = 1 << 20;
const SLOWEST_CALLS: u64 = 50;
const AROUND: Duration = Duration::from_secs(180);

#[derive(Clone, Debug)]
pub struct Load {
    pub test: Test,
    /// Of the file.
    pub size: u64,
    /// Of the random tests.
    pub runtime: Duration,
    /// Small files.
    pub files: u64,
    /// O_DIRECT.
    pub direct: bool,
}

/// Where a script finds things, in the shell's spelling.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The directory under test.
    pub tree: &'a str,
    /// A directory of the same machine's for all else.
    pub notes: &'a str,
    /// How to call this program.
    pub fathom: &'a str,
}

impl Load {
    /// Makes what there has to be before the test, and writes it back. Then the guest has nothing
    /// of it in memory.
    pub fn prepare(&self, place: Place) -> String {
        let make = match self.test {
            Test::Write | Test::Create => ":".to_owned(),
            test if test.is_of_data() => self.fio(place, "--rw=write --bs=1M --end_fsync=1"),
            _ => self.names(place, Test::Create),
        };
        format!("{{ {make}\n}} >{}/made\nsync\n", place.notes)
    }

    /// The test, which prints what [`parse`](Self::parse) takes.
    pub fn run(&self, place: Place) -> String {
        let direct = format!("--direct={}", u8::from(self.direct));
        let random = format!("--bs=4k --runtime={}", short_duration(self.runtime));
        match self.test {
            Test::Write => self.fio(place, &format!("{direct} --rw=write --bs=1M --end_fsync=1")),
            Test::Read => self.fio(place, &format!("{direct} --rw=read --bs=1M")),
            Test::RandomWrite => {
                let job = format!("{direct} --rw=randwrite {random} --end_fsync=1");
                self.fio(place, &job)
            }
            Test::RandomRead => self.fio(place, &format!("{direct} --rw=randread {random}")),
            Test::Create | Test::Stat | Test::Rename | Test::Delete => self.names(place, self.test),
        }
    }

    /// Where space is reserved before, some ways would have less to do in the test than others.
    fn fio(&self, place: Place, job: &str) -> String {
        let Place { tree, notes, .. } = place;
        format!(
            "fio --name=sharing --filename={tree}/{DATA} --size={} --ioengine=psync --thread \
             --fallocate=none --output-format=json {job} 2>{notes}/log || \
             {{ cat {notes}/log >&2; exit 1; }}",
            self.size
        )
    }

    fn names(&self, place: Place, call: Test) -> String {
        let Place { tree, fathom, .. } = place;
        format!(
            "{fathom} guest names {tree}/files --call {call} --count {}",
            self.files
        )
    }

    /// The figures of what [`run`](Self::run) has printed.
    ///
    /// # Errors
    /// When it is no report.
    pub fn parse(&self, text: &str) -> Result<Worked> {
        if self.test.is_of_data() {
            return Worked::of_fio(text, ONE);
        }
        let from = text.find('{').unwrap_or(text.len());
        let report: Report = serde_json::from_str(&text[from..]).map_err(|error| {
            Error::Protocol(format!("`fathom guest names` printed no report: {error}"))
        })?;
        let mut worked = Worked::of_files(&report);
        worked.measures.retain(|one| one.name != "throughput"); // of names there is none
        Ok(worked)
    }

    /// For the test, and for what comes before it.
    pub fn patience(&self) -> Duration {
        AROUND + Duration::from_secs(self.size / SLOWEST + self.files / SLOWEST_CALLS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place {
        tree: "/mnt",
        notes: "/tmp",
        fathom: "fathom",
    };

    fn load(test: Test) -> Load {
        Load {
            test,
            size: 8 << 20,
            runtime: Duration::from_secs(5),
            files: 100,
            direct: true,
        }
    }

    #[test]
    fn what_a_test_needs_is_there_before_it() {
        for &test in Test::ALL {
            let made = load(test).prepare(PLACE);
            let makes_data = made.contains("fio") && made.contains("--end_fsync=1");
            let makes_files = made.contains("--call create --count 100");
            let is_first = matches!(test, Test::Write | Test::Create);
            assert_eq!(makes_data, test.is_of_data() && !is_first, "{made}");
            assert_eq!(makes_files, !test.is_of_data() && !is_first, "{made}");
            assert!(!made.contains("--direct"), "{made}");
        }
    }

    #[test]
    fn writes_end_with_a_flush_and_only_random_tests_with_their_time() {
        for test in Test::ALL.iter().filter(|test| test.is_of_data()) {
            let script = load(*test).run(PLACE);
            assert_eq!(script.contains("--end_fsync=1"), test.is_flushed());
            assert_eq!(script.contains("--runtime=5s"), !test.is_streaming());
            assert!(script.contains("--direct=1"), "{script}");
        }
        let script = load(Test::Rename).run(PLACE);
        assert!(script.contains("--call rename --count 100"), "{script}");
    }

    #[test]
    fn a_report_of_another_form_is_an_error() {
        for test in [Test::Read, Test::Stat] {
            for text in ["", "{}", "fathom: no room"] {
                assert!(load(test).parse(text).is_err(), "{text}");
            }
        }
    }
}
