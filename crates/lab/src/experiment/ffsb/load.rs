//! The talk's scenarios, and the scripts that create their files and run them. The scripts are the
//! same in a guest and on the host.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use fathom_load::files::fio::{self, job_file, make_file};
use fathom_load::files::{Options as MailServer, Report};
use fathom_units::short_duration;

use crate::error::{Error, Result};
use crate::shell::quoted;
use crate::work::{Shape, Worked};

/// A row of the talk's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// A scenario that fio can run, and its block size in bytes.
    Fio(fio::Scenario, u32),
    MailServer,
}

const SMALL: u32 = 8 << 10;
const LARGE: u32 = 256 << 10;

impl Scenario {
    /// All scenarios, in the talk's order.
    pub const ALL: [Scenario; 8] = [
        Scenario::Fio(fio::Scenario::LargeFileCreates, LARGE),
        Scenario::Fio(fio::Scenario::SequentialReads, LARGE),
        Scenario::Fio(fio::Scenario::LargeFileCreates, SMALL),
        Scenario::Fio(fio::Scenario::SequentialReads, SMALL),
        Scenario::Fio(fio::Scenario::RandomReads, SMALL),
        Scenario::Fio(fio::Scenario::RandomWrites, SMALL),
        Scenario::Fio(fio::Scenario::Mixed, SMALL),
        Scenario::MailServer,
    ];
    /// The accepted values, for help.
    pub const FORM: &str = "large-file-creates-256k, sequential-reads-256k, \
                            large-file-creates-8k, sequential-reads-8k, random-reads, \
                            random-writes, mixed, mail-server";
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fio::Scenario::{LargeFileCreates, SequentialReads};
        match self {
            Scenario::Fio(one @ (LargeFileCreates | SequentialReads), size) => {
                write!(f, "{}-{}k", one.name(), size >> 10)
            }
            Scenario::Fio(one, _) => f.write_str(one.name()),
            Scenario::MailServer => f.write_str("mail-server"),
        }
    }
}

impl FromStr for Scenario {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Scenario, String> {
        let found = Scenario::ALL
            .into_iter()
            .find(|one| one.to_string() == text);
        found.ok_or_else(|| format!("unknown value '{text}'; values are {}", Scenario::FORM))
    }
}

/// Factor for the talk's sizes and times: above 0, at most 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale(pub f64);

impl FromStr for Scale {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Scale, String> {
        match text.parse() {
            Ok(share) if share > 0.0 && share <= 1.0 => Ok(Scale(share)),
            _ => Err(format!("'{text}' is not a number above 0, and at most 1")),
        }
    }
}

/// The work of a cell, in a guest or on the host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    pub scenario: Scenario,
    pub threads: u16,
    pub scale: Scale,
    pub runtime: Duration,
    pub seed: u64,
}

/// Paths for scripts, quoted for the shell.
#[derive(Clone, Debug)]
pub struct Place {
    /// An empty directory for the load's files.
    pub files: String,
    /// A directory for all other files.
    pub notes: String,
    /// The command that runs this program.
    pub fathom: String,
}

impl Place {
    /// Returns the paths in a guest.
    pub fn in_guest() -> Place {
        Place {
            files: "/mnt".into(),
            notes: "/tmp".into(),
            fathom: "fathom".into(),
        }
    }

    /// Returns the paths on this machine, relative to the script's working directory.
    pub fn on_host(fathom: &Path) -> Place {
        Place {
            files: "./files".into(),
            notes: ".".into(),
            fathom: quoted(&fathom.to_string_lossy()),
        }
    }
}

/// Raises the limit of open files: at the talk's size, each process of fio opens many.
const LIMITS: &str = "ulimit -n \"$(ulimit -H -n)\"";
/// Writes all data back, and drops the page cache if permitted.
const FORGET: &str = "sync\n{ echo 3 >/proc/sys/vm/drop_caches; } 2>/dev/null || true";

impl Load {
    /// Checks the load before anything is run.
    ///
    /// # Errors
    /// If the numbers do not go together.
    pub fn check(&self) -> Result<()> {
        match self.scenario {
            Scenario::Fio(one, size) => self.job("/mnt", one, size).map(drop),
            Scenario::MailServer => Ok(self.mail_server()?.validate()?),
        }
    }

    /// Returns the estimated maximum size of the load's files, in bytes.
    pub fn bytes(&self) -> Result<u64> {
        Ok(match self.scenario {
            Scenario::Fio(one, size) => self.fio_job(Path::new("/mnt"), one, size).bytes(),
            // The number of files may double while the load runs.
            Scenario::MailServer => {
                let options = self.mail_server()?;
                let mean = u64::from(options.max_size.min(MEAN_MAIL));
                2 * mean * u64::from(options.files)
            }
        })
    }

    /// Returns a script that creates the files.
    pub fn prepare(&self, place: &Place) -> Result<String> {
        let Place {
            files,
            notes,
            fathom,
        } = place;
        let make = match self.scenario {
            // This scenario creates its files itself.
            Scenario::Fio(fio::Scenario::LargeFileCreates, _) => String::new(),
            Scenario::Fio(one, size) => {
                let job = make_file(&self.fio_job(Path::new(files), one, size))?;
                run_fio(notes, "files", &job)
            }
            Scenario::MailServer => format!(
                "{fathom} bench {files} {} --prepare-only >{notes}/files.json",
                self.mail_server_words()
            ),
        };
        Ok(format!("{LIMITS}\n{make}\n{FORGET}\n"))
    }

    /// Returns a script that runs the load on the files; [`parse`](Self::parse) takes its output.
    pub fn run(&self, place: &Place) -> Result<String> {
        let Place {
            files,
            notes,
            fathom,
        } = place;
        let load = match self.scenario {
            Scenario::Fio(one, size) => {
                let job = self.job(files, one, size)?;
                format!("{}\ncat {notes}/load.json", run_fio(notes, "load", &job))
            }
            Scenario::MailServer => format!(
                "{fathom} bench {files}/fathom-bench.* {} --prepared --keep",
                self.mail_server_words()
            ),
        };
        Ok(format!("{LIMITS}\n{load}\n"))
    }

    /// Parses the output of [`run`](Self::run).
    pub fn parse(&self, text: &str) -> Result<Worked> {
        match self.scenario {
            Scenario::Fio(..) => {
                let threads = self.threads.into();
                Worked::of_fio(text, Shape { threads, depth: 1 })
            }
            Scenario::MailServer => {
                let from = text.find('{').unwrap_or(text.len());
                let report: Report = serde_json::from_str(&text[from..]).map_err(|error| {
                    Error::Protocol(format!("`fathom bench` printed no report: {error}"))
                })?;
                Ok(Worked::of_files(&report))
            }
        }
    }

    fn fio_job<'a>(&self, dir: &'a Path, scenario: fio::Scenario, bs: u32) -> fio::Job<'a> {
        fio::Job {
            scenario,
            dir,
            threads: self.threads,
            scale: self.scale.0,
            runtime: self.runtime,
            bs,
            direct: true,
        }
    }

    /// Returns the text of a job file for fio.
    fn job(&self, dir: &str, one: fio::Scenario, size: u32) -> Result<String> {
        let text = job_file(&self.fio_job(Path::new(dir), one, size))?;
        Ok(format!("{text}randseed={}\n", self.seed))
    }

    fn mail_server(&self) -> Result<MailServer> {
        let options = MailServer {
            threads: self.threads,
            dirs: self.dirs(),
            bs: SMALL,
            runtime: Some(self.runtime),
            seed: self.seed,
            ..MailServer::new("/mnt")
        };
        Ok(options.scaled(self.scale.0)?)
    }

    /// Returns the same options as arguments of `fathom bench`.
    fn mail_server_words(&self) -> String {
        let Load { threads, scale, .. } = self;
        format!(
            "--workload mail-server --threads {threads} --dirs {} --scale {} --bs 8k --runtime {} \
             --randseed {} --json",
            self.dirs(),
            scale.0,
            short_duration(self.runtime),
            self.seed
        )
    }

    /// Number of directories: the talk's 100, or one for each thread if that is more.
    fn dirs(&self) -> u16 {
        self.threads.max(100)
    }
}

/// Mean size of the mail server's files, in bytes.
const MEAN_MAIL: u32 = 48 << 10;

/// Returns a script that runs fio with a job, and writes its report to NOTES/NAME.json.
fn run_fio(notes: &str, name: &str, job: &str) -> String {
    format!(
        "cat >{notes}/{name}.fio <<'END OF JOB'\n{job}END OF JOB\n\
         fio --output-format=json --output={notes}/{name}.json {notes}/{name}.fio \
         >{notes}/fio.log 2>&1 || {{ cat {notes}/fio.log {notes}/{name}.json; exit 1; }}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(scenario: &str) -> Load {
        Load {
            scenario: scenario.parse().unwrap(),
            threads: 8,
            scale: Scale(0.01),
            runtime: Duration::from_millis(1500),
            seed: 7,
        }
    }

    #[test]
    fn scenarios_are_read_as_they_are_written() {
        let words: Vec<String> = Scenario::ALL.iter().map(Scenario::to_string).collect();
        assert_eq!(words.join(", "), Scenario::FORM);
        for one in Scenario::ALL {
            assert_eq!(one.to_string().parse(), Ok(one));
        }
        assert!("reads".parse::<Scenario>().is_err());
        assert_eq!("0.25".parse(), Ok(Scale(0.25)));
        for bad in ["0", "1.1", "-1", "NaN", "inf", "x", ""] {
            assert!(bad.parse::<Scale>().is_err(), "{bad}");
        }
    }

    #[test]
    fn files_are_made_before_loads_that_do_not_create_them() {
        let place = Place::in_guest();
        let scripts = |scenario: &str| {
            let load = load(scenario);
            load.check().unwrap();
            (load.prepare(&place).unwrap(), load.run(&place).unwrap())
        };
        let (prepare, run) = scripts("random-writes");
        assert!(prepare.contains("\ncreate_only=1\n") && !prepare.contains("numjobs"));
        assert!(run.contains("\nnumjobs=8\n"));
        assert!(
            run.contains("\nrw=randwrite\n") && run.contains("\nrandseed=7\n"),
            "{run}"
        );
        assert!(!run.contains("create_only") && prepare.ends_with("|| true\n"));
        // The files are the same.
        let files = &place.files;
        assert!(
            prepare.contains(&format!("directory={files}\n")),
            "{prepare}"
        );
        assert!(run.contains(&format!("opendir={files}\n")), "{run}");
        let (prepare, run) = scripts("large-file-creates-256k");
        assert!(!prepare.contains("fio"), "{prepare}");
        assert!(run.contains("\nbs=262144\n"), "{run}");
        let (prepare, run) = scripts("mail-server");
        assert!(prepare.contains("--prepare-only") && run.contains("--prepared --keep"));
        assert!(
            run.contains("--runtime 1500ms") && run.contains("--threads 8"),
            "{run}"
        );
    }

    #[test]
    fn a_report_of_another_form_is_an_error() {
        for scenario in ["mail-server", "mixed"] {
            for text in ["", "{}", "fathom: no room", "{\"jobs\": 1}"] {
                assert!(load(scenario).parse(text).is_err(), "{text}");
            }
        }
    }

    #[test]
    fn what_cannot_work_is_said() {
        let many = Load {
            threads: 200,
            ..load("mail-server")
        };
        let few = Load {
            scale: Scale(1e-6),
            ..many
        };
        many.check().unwrap();
        assert!(few.check().unwrap_err().to_string().contains("a file each"));
    }
}
