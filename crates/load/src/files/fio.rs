//! Scenarios that fio can run: writes their job files, and converts fio's results.
//!
//! Like the mail server, these scenarios are reconstructions of profiles that are not public.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::options::{MAX_BS, MAX_THREADS, SECTOR};
use super::report::{Operation, Report};
use crate::error::{Error, Result};
use crate::report::Latency;

/// Size in bytes of the file that each thread of `LargeFileCreates` creates repeatedly.
const LARGE_FILE: u64 = 1 << 30;
/// Size in bytes, and number, of the files of all other scenarios.
const FILE: u64 = 100 << 20;
const FILES: u32 = 1024;
/// Lower limits for the sizes of files after scaling, in bytes.
const SCALED_LARGE_FILE: u64 = 4 << 20;
const SCALED_FILE: u64 = 1 << 20;

/// A scenario of the talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Each thread writes a large file sequentially, removes it, and starts again.
    LargeFileCreates,
    /// Each thread reads a random file sequentially, and then the next one.
    SequentialReads,
    /// Each thread reads random blocks of random files.
    RandomReads,
    /// Each thread writes random blocks of random files.
    RandomWrites,
    /// Each thread accesses random blocks of random files; 70% of the requests are reads.
    Mixed,
}

impl Scenario {
    /// All scenarios.
    pub const ALL: [Scenario; 5] = [
        Scenario::LargeFileCreates,
        Scenario::SequentialReads,
        Scenario::RandomReads,
        Scenario::RandomWrites,
        Scenario::Mixed,
    ];

    /// Returns the name of the scenario in options and results.
    pub fn name(self) -> &'static str {
        match self {
            Scenario::LargeFileCreates => "large-file-creates",
            Scenario::SequentialReads => "sequential-reads",
            Scenario::RandomReads => "random-reads",
            Scenario::RandomWrites => "random-writes",
            Scenario::Mixed => "mixed",
        }
    }
}

/// A run of a scenario.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Scenario that fio runs.
    pub scenario: Scenario,
    /// An existing directory that contains only the files of the load.
    pub dir: &'a Path,
    /// Number of threads, each with one request in flight.
    pub threads: u16,
    /// Factor for the number of files and their sizes. At 1, there are 1,024 files of 100 MiB, and
    /// large files have 1 GiB.
    pub scale: f64,
    /// Duration of the load, at least 1 ms.
    pub runtime: Duration,
    /// Size of a request in bytes, a multiple of 512.
    pub bs: u32,
    /// Use O_DIRECT.
    pub direct: bool,
}

impl Job<'_> {
    /// Returns the maximum size in bytes of all files together.
    pub fn bytes(&self) -> u64 {
        let (count, size) = self.files();
        let owners = match self.scenario {
            Scenario::LargeFileCreates => u64::from(self.threads),
            _ => 1,
        };
        size.saturating_mul(count.into()).saturating_mul(owners)
    }

    /// Returns the number of files and the size of each in bytes.
    fn files(&self) -> (u32, u64) {
        let shrink = |size: u64, least: u64| {
            let size = ((size as f64 * self.scale) as u64).max(least);
            size / u64::from(self.bs) * u64::from(self.bs)
        };
        match self.scenario {
            Scenario::LargeFileCreates => (1, shrink(LARGE_FILE, SCALED_LARGE_FILE)),
            _ => {
                let count = (f64::from(FILES) * self.scale) as u32;
                (count.max(1), shrink(FILE, SCALED_FILE))
            }
        }
    }

    fn validate(&self) -> Result<()> {
        let refuse = |text: String| Err(Error::Options(text));
        if !(self.scale > 0.0 && self.scale <= 1.0) {
            return refuse("the scale must be above 0, and at most 1".into());
        }
        if !(SECTOR..=MAX_BS).contains(&self.bs) || !self.bs.is_multiple_of(SECTOR) {
            return refuse(format!(
                "the block size must be a multiple of {SECTOR} up to {MAX_BS}"
            ));
        }
        if !(1..=MAX_THREADS).contains(&self.threads) || self.runtime.as_millis() == 0 {
            return refuse(format!(
                "threads must be from 1 to {MAX_THREADS}, and the time not 0"
            ));
        }
        Ok(())
    }
}

/// Returns a fio job that only creates the files of `job`. The job is empty for a scenario that
/// creates its own files.
///
/// # Errors
/// Like [`job_file`].
pub fn make_file(job: &Job<'_>) -> Result<String> {
    job.validate()?;
    let dir = directory(job.dir)?.replace(':', "\\:");
    let (files, size) = job.files();
    Ok(match job.scenario {
        Scenario::LargeFileCreates => String::new(),
        // A job that reads makes fio fill the files with data. The scenarios that write need that
        // data, too.
        _ => format!(
            "[files]\ndirectory={dir}\nrw=read\nioengine=psync\nbs={}\nnrfiles={files}\n\
             filesize={size}\nsize={}\nfilename_format=fathom-fio.$filenum\ncreate_only=1\n",
            job.bs,
            size * u64::from(files),
        ),
    })
}

/// Returns the job as a fio job file, for files that the job of [`make_file`] has created.
///
/// All threads use all files of the directory (`opendir`). With `filename_format`, fio would assign
/// the files to the first thread, and the other threads would do nothing.
///
/// # Errors
/// If numbers are out of range, or the directory's name cannot be written in a job file.
pub fn job_file(job: &Job<'_>) -> Result<String> {
    job.validate()?;
    let dir = directory(job.dir)?;
    let (files, size) = job.files();
    let place = match job.scenario {
        Scenario::LargeFileCreates => format!(
            "directory={}\nnrfiles={files}\nfilesize={size}\nsize={size}",
            dir.replace(':', "\\:")
        ),
        _ => format!("opendir={dir}"),
    };
    let mut text = format!(
        "[global]\n{place}\ndirect={}\nioengine=psync\niodepth=1\nnumjobs={}\n\
         group_reporting=1\nruntime={}ms\nbs={}\n",
        u8::from(job.direct),
        job.threads,
        job.runtime.as_millis(),
        job.bs,
    );
    let per_file = size / u64::from(job.bs);
    // Writing to a string cannot fail.
    let _ = write!(text, "\n[{}]\n", job.scenario.name());
    let _ = match job.scenario {
        // Create the file anew in each pass, like FFSB. A job limited only by time (`time_based`)
        // opens its file once, and overwrites it from the second pass on.
        Scenario::LargeFileCreates => write!(
            text,
            "rw=write\nloops={LOOPS}\nunlink_each_loop=1\nunlink=1\ncreate_on_open=1\n\
             fallocate=none\nend_fsync=1\n"
        ),
        Scenario::SequentialReads => write!(
            text,
            "rw=read\nfile_service_type=random:{per_file}\n{SHARED}"
        ),
        Scenario::RandomReads => write!(text, "rw=randread\n{RANDOM}{SHARED}"),
        Scenario::RandomWrites => write!(text, "rw=randwrite\n{RANDOM}{SHARED}end_fsync=1\n"),
        Scenario::Mixed => write!(
            text,
            "rw=randrw\nrwmixread=70\n{RANDOM}{SHARED}end_fsync=1\n"
        ),
    };
    Ok(text)
}

/// Number of passes over a file, more than any run time permits.
const LOOPS: u32 = 1_000_000;
/// Makes the job run for the whole time.
const SHARED: &str = "time_based=1\n";
const RANDOM: &str = "norandommap=1\nfile_service_type=random\n";

/// Returns a directory name that job files can contain. In them, `${}` is a variable.
fn directory(dir: &Path) -> Result<&str> {
    let refuse = |why| Error::Options(format!("{} {why}", dir.display()));
    let text = dir.to_str().ok_or_else(|| refuse("is not UTF-8"))?;
    if text.contains(['\\', '$']) || text.contains(char::is_control) || text.trim() != text {
        return Err(refuse("has a name that fio cannot take"));
    }
    Ok(text)
}

/// fio's results of a group of jobs.
#[derive(Clone, Debug)]
pub struct Results {
    /// Reads and writes, if there were any.
    pub operations: Vec<Operation>,
    /// Run time in seconds.
    pub runtime: f64,
    /// CPU time of all threads in seconds.
    pub cpu: f64,
}

/// Parses fio's JSON report of one group of jobs. Skips warnings that fio prints before it.
///
/// # Errors
/// If the text is not a report of fio with exactly one group of jobs, or the job failed.
pub fn results(text: &str) -> Result<Results> {
    let start = text.find('{').unwrap_or(text.len());
    let value: Value = serde_json::from_str(&text[start..])
        .map_err(|e| Error::Fio(format!("the report is not JSON: {e}")))?;
    let group = match value["jobs"].as_array().map(Vec::as_slice) {
        Some([group]) => group,
        _ => {
            return Err(Error::Fio(
                "the report does not have exactly one group of jobs".into(),
            ));
        }
    };
    if let Some(errno) = group["error"].as_i64()
        && errno != 0
    {
        let cause = std::io::Error::from_raw_os_error(i32::try_from(errno).unwrap_or(0));
        return Err(Error::Fio(format!(
            "the job failed: {}",
            fathom_units::cause(cause)
        )));
    }
    figures(group).ok_or_else(|| Error::Fio("the report lacks figures".into()))
}

/// Returns the results of a group, or `None` if figures are missing.
fn figures(group: &Value) -> Option<Results> {
    let (mut operations, mut runtime) = (Vec::new(), 0.0f64);
    for op in ["read", "write"] {
        let side = &group[op];
        if side["total_ios"].as_u64().unwrap_or(0) > 0 {
            operations.push(operation(op, side)?);
            runtime = runtime.max(side["runtime"].as_f64()? / 1e3);
        }
    }
    // Total run time of all jobs, converted from ms to seconds.
    let spent = group["job_runtime"].as_f64()? / 1e3;
    let cpu_percent = group["usr_cpu"].as_f64()? + group["sys_cpu"].as_f64()?;
    Some(Results {
        operations,
        runtime,
        cpu: cpu_percent / 100.0 * spent,
    })
}

/// Parses fio's JSON report of the job that [`job_file`] returned for `job`.
///
/// # Errors
/// Like [`results`].
pub fn parse(text: &str, job: &Job<'_>) -> Result<Report> {
    job.validate()?;
    let Results {
        operations,
        runtime,
        cpu,
    } = results(text)?;
    let ios: u64 = operations
        .iter()
        .map(|o| o.ios)
        .fold(0, u64::saturating_add);
    let files = u64::from(job.files().0);
    Ok(Report {
        directory: job.dir.to_owned(),
        workload: job.scenario.name().into(),
        bs: job.bs,
        threads: job.threads,
        direct: job.direct,
        files: match job.scenario {
            Scenario::LargeFileCreates => 0,
            _ => files,
        },
        dirs: 1,
        prepare: None,
        runtime,
        sync: None,
        iops: operations.iter().map(|o| o.iops).sum(),
        mb_per_s: operations.iter().map(|o| o.mb_per_s).sum(),
        operations,
        client_cpu_us_per_request: cpu * 1e6 / ios.max(1) as f64,
        verify: None,
        kept: None,
    })
}

/// Returns the latencies of `requests` requests from fio's `clat_ns`. A percentile that fio does
/// not report, or that is chance, is `None`. Returns `None` if fio measured no latencies, as with
/// `disable_clat`.
pub fn latency(clat: &Value, requests: u64) -> Option<Latency> {
    if clat["N"].as_u64() == Some(0) {
        return None;
    }
    let percentile = |name: &str| clat["percentile"][name].as_f64();
    let latency = Latency {
        mean_ns: clat["mean"].as_f64()?,
        p50_ns: percentile("50.000000"),
        p90_ns: percentile("90.000000"),
        p99_ns: percentile("99.000000"),
        p999_ns: percentile("99.900000"),
        max_ns: clat["max"].as_f64()?,
    };
    Some(latency.known(requests))
}

fn operation(op: &str, side: &Value) -> Option<Operation> {
    let (ios, iops) = (side["total_ios"].as_u64()?, side["iops"].as_f64()?);
    Some(Operation {
        op: op.into(),
        ops: ios,
        ios,
        bytes: side["io_bytes"].as_u64()?,
        ops_per_s: iops,
        iops,
        mb_per_s: side["bw_bytes"].as_f64()? / 1e6,
        latency: latency(&side["clat_ns"], ios)?,
        histogram: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(scenario: Scenario) -> Job<'static> {
        Job {
            scenario,
            dir: Path::new("/mnt/a:b"),
            threads: 8,
            scale: 1.0,
            runtime: Duration::from_millis(1500),
            bs: 8 << 10,
            direct: true,
        }
    }

    #[test]
    fn a_job_says_what_the_scenario_is() {
        let text = job_file(&job(Scenario::SequentialReads)).unwrap();
        for line in [
            "opendir=/mnt/a:b",
            "direct=1",
            "numjobs=8",
            "runtime=1500ms",
            "bs=8192",
            "[sequential-reads]",
            "file_service_type=random:12800",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        let small = Job {
            scale: 0.001,
            bs: 256 << 10,
            ..job(Scenario::LargeFileCreates)
        };
        let text = job_file(&small).unwrap();
        assert!(text.contains("\nfilesize=4194304\n"), "{text}");
        assert!(text.contains("\ndirectory=/mnt/a\\:b\n"), "{text}");
        assert!(text.contains("\nunlink_each_loop=1\n"), "{text}");
        assert!(!text.contains("time_based"), "{text}");
        let text = make_file(&job(Scenario::Mixed)).unwrap();
        assert!(text.contains("\nnrfiles=1024\n"), "{text}");
        assert!(text.contains("\nfilesize=104857600\n"), "{text}");
        // Eight threads have one file each.
        assert_eq!(small.bytes(), 8 * 4_194_304);
        assert_eq!(job(Scenario::Mixed).bytes(), 1024 * (100 << 20));
    }

    #[test]
    fn what_fio_would_misread_is_refused() {
        for dir in ["/mnt/${HOME}", "/mnt/a\nrw=write", "/mnt/ "] {
            let job = Job {
                dir: Path::new(dir),
                ..job(Scenario::Mixed)
            };
            assert!(job_file(&job).is_err(), "{dir:?}");
        }
        for scale in [0.0, 2.0, f64::NAN] {
            let job = Job {
                scale,
                ..job(Scenario::Mixed)
            };
            assert!(job_file(&job).is_err(), "{scale}");
        }
    }

    #[test]
    fn unknown_percentile_of_fio_stays_unknown() {
        let clat = serde_json::json!({"N": 900, "mean": 5.0, "max": 9,
            "percentile": {"50.000000": 4, "99.000000": 8, "99.900000": 9}});
        let of = |requests| latency(&clat, requests).unwrap();
        // fio prints a p99.9 of any number of requests, and here no p90.
        let few = of(900);
        assert_eq!(
            (few.p50_ns, few.p90_ns, few.p99_ns),
            (Some(4.0), None, None)
        );
        assert_eq!((few.p999_ns, few.max_ns), (None, 9.0));
        let many = of(10_000);
        assert_eq!((many.p90_ns, many.p99_ns), (None, Some(8.0)));
        assert_eq!(many.p999_ns, Some(9.0));
        let disabled = serde_json::json!({"N": 0, "mean": 0.0, "max": 0});
        assert_eq!(latency(&disabled, 900), None);
    }

    #[test]
    fn a_report_of_another_form_is_an_error() {
        let cases = [
            ("", "not JSON"),
            ("fio: no such option", "not JSON"),
            ("{}", "exactly one group"),
            (r#"{"jobs": [{}, {}]}"#, "exactly one group"),
            (r#"{"jobs": [{"error": 28}]}"#, "no space left"),
            (r#"{"jobs": [{"read": {"total_ios": 1}}]}"#, "lacks figures"),
            (
                r#"{"jobs": [{"usr_cpu": 1, "job_runtime": 9}]}"#,
                "lacks figures",
            ),
        ];
        for (text, problem) in cases {
            let error = parse(text, &job(Scenario::RandomReads))
                .unwrap_err()
                .to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
