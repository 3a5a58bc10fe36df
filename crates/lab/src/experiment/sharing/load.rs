//! Tests on the files, as scripts that are the same in guests and on this machine.

use std::time::Duration;

use fathom_load::files::Report;
use fathom_units::short_duration;

use crate::error::{Error, Result};
use crate::words::words;
use crate::work::{Shape, Worked};

words! {
    /// Work on the files.
    pub enum Test {
        /// Writes a new file sequentially, in 1 MiB, with fsync at the end.
        Write = "write",
        /// Reads such a file sequentially, in 1 MiB.
        Read = "read",
        /// Writes the blocks of 4 KiB of the file in random order, each once.
        RandomWrite = "random-write",
        RandomRead = "random-read",
        /// Creates many small files.
        Create = "create",
        Stat = "stat",
        Rename = "rename",
        Delete = "delete",
    }
}

impl Test {
    /// All tests, separated by commas.
    pub const FORM_AS_DEFAULT: &str =
        "write,read,random-write,random-read,create,stat,rename,delete";

    pub fn is_streaming(self) -> bool {
        matches!(self, Test::Write | Test::Read)
    }

    /// Whether the test moves data. Other tests work on names.
    pub fn is_of_data(self) -> bool {
        self.is_streaming() || matches!(self, Test::RandomWrite | Test::RandomRead)
    }

    /// Whether all data has been flushed to the device when the test ends.
    pub fn is_flushed(self) -> bool {
        matches!(self, Test::Write | Test::RandomWrite)
    }
}

/// Name of the file for tests that move data.
pub const DATA: &str = "data";
const ONE: Shape = Shape {
    threads: 1,
    depth: 1,
};
/// Minimum speed expected of a way, in bytes and in calls per second.
const SLOWEST: u64 = 1 << 20;
const SLOWEST_CALLS: u64 = 50;
const AROUND: Duration = Duration::from_secs(180);

#[derive(Clone, Debug)]
pub struct Load {
    pub test: Test,
    /// Size of the file, in bytes.
    pub size: u64,
    /// Maximum time of the random tests.
    pub runtime: Duration,
    /// Number of small files.
    pub files: u64,
    /// Whether data bypasses the guest's page cache (O_DIRECT).
    pub direct: bool,
}

/// Paths for scripts, quoted for the shell.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The directory under test.
    pub tree: &'a str,
    /// A directory on the same machine for all other files.
    pub notes: &'a str,
    /// The command that runs this program.
    pub fathom: &'a str,
}

impl Load {
    /// Returns a script that creates the files that the test needs, and writes them back.
    pub fn prepare(&self, place: Place) -> String {
        let make = match self.test {
            Test::Write | Test::Create => ":".to_owned(),
            test if test.is_of_data() => self.fio(place, "--rw=write --bs=1M --end_fsync=1"),
            _ => self.names(place, Test::Create),
        };
        format!("{{ {make}\n}} >{}/made\nsync\n", place.notes)
    }

    /// Returns a script that runs the test; [`parse`](Self::parse) takes its output.
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

    /// Space is not reserved in advance: some ways would then have less work in the test than
    /// others. The page cache stays as it is: fio would empty the host's cache for the work on the
    /// host, and only the guest's for the other ways.
    fn fio(&self, place: Place, job: &str) -> String {
        let Place { tree, notes, .. } = place;
        format!(
            "fio --name=sharing --filename={tree}/{DATA} --size={} --ioengine=psync --thread \
             --invalidate=0 --fallocate=none --output-format=json {job} 2>{notes}/log || \
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

    /// Parses the output of [`run`](Self::run).
    ///
    /// # Errors
    /// If the text is not a report.
    pub fn parse(&self, text: &str) -> Result<Worked> {
        if self.test.is_of_data() {
            return Worked::of_fio(text, ONE);
        }
        let from = text.find('{').unwrap_or(text.len());
        let report: Report = serde_json::from_str(&text[from..]).map_err(|error| {
            Error::Protocol(format!("`fathom guest names` printed no report: {error}"))
        })?;
        let mut worked = Worked::of_files(&report);
        worked.measures.retain(|one| one.name != "throughput"); // operations on names have no throughput
        Ok(worked)
    }

    /// Returns the time limit of the test, and of its preparation.
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
    fn writes_end_with_a_flush_and_random_tests_by_time() {
        for test in Test::ALL.iter().filter(|test| test.is_of_data()) {
            let script = load(*test).run(PLACE);
            assert_eq!(script.contains("--end_fsync=1"), test.is_flushed());
            assert_eq!(script.contains("--runtime=5s"), !test.is_streaming());
            assert!(script.contains("--direct=1"), "{script}");
            assert!(script.contains("--invalidate=0"), "{script}");
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
