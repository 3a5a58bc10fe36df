//! `fathom bench`: fio's option names to the load generator's options.

mod files;
mod record;
mod together;
mod users;

use self::files::FilesArgs;
use self::record::Record;
use self::together::{Clients, Noise};
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use crate::breakdown::stop_on_signal;
use anyhow::{Context, bail};
use clap::builder::{ArgPredicate, PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args, ValueEnum};
use fathom_load::files::Options as MailServer;
use fathom_load::{
    Engine, File, Load, Nbd, NbdUri, Options, Phase, Progress, Replies, Rw, Target, VhostUser,
    Wait, parse_cpu_list,
};
use fathom_units::{parse_seconds, parse_size};
use serde::Serialize;

/// Measure a vhost-user-blk or NBD server, a file for comparison, or a file system
///
/// Ctrl-C ends it early, and prints what was measured until then.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("target").required(true).args(["path", "vhost_user", "nbd", "client"]))]
pub struct BenchArgs {
    /// File or block device of this host to measure, or with --workload a
    /// directory
    path: Option<PathBuf>,

    /// Be the front-end of the vhost-user-blk server on this socket
    #[arg(long, value_name = "SOCKET")]
    vhost_user: Option<PathBuf>,

    /// Be the client of an NBD server: nbd://HOST[:PORT]/EXPORT or
    /// nbd+unix:///EXPORT?socket=PATH
    #[arg(long, value_name = "URI")]
    nbd: Option<NbdUri>,

    /// Print what the server offers and leave
    #[arg(long, conflicts_with = "path")]
    info: bool,

    /// Kind of load
    #[arg(long, default_value = "randread", value_parser = rw())]
    rw: Rw,

    /// Percentage of reads in rw and randrw
    #[arg(long, value_name = "PERCENT", default_value_t = 50)]
    rwmixread: u8,

    /// Percentage of all requests that discard
    #[arg(long, value_name = "PERCENT", default_value_t = 0)]
    rwmixtrim: u8,

    /// Percentage of all requests that write zeroes
    #[arg(long, value_name = "PERCENT", default_value_t = 0)]
    rwmixzero: u8,

    /// Bytes per request; with --workload 8k if not given
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = parse_size,
        default_value = "4k",
        default_value_if("workload", ArgPredicate::IsPresent, "8k")
    )]
    bs: u64,

    /// Requests in flight per queue
    #[arg(long, value_name = "N", default_value_t = 1)]
    iodepth: u16,

    /// Virtqueues, connections, workers on a file, or threads (--threads)
    #[arg(
        long,
        aliases = ["numjobs", "connections", "threads"],
        value_name = "N",
        default_value_t = 1
    )]
    queues: u16,

    /// Entries of a virtqueue [default: what iodepth needs, at least 128]
    #[arg(long, value_name = "N", help_heading = "vhost-user")]
    queue_size: Option<u16>,

    /// Time to measure [default: 10s, without limit with --number-ios]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    runtime: Option<Duration>,

    /// Load before the measurement [default: 1s, none with --number-ios]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    ramp_time: Option<Duration>,

    /// Bytes of the disk to use [default: all from --offset]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,

    /// First byte to use
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    offset: u64,

    /// Stop after so many requests per queue
    #[arg(long, value_name = "N")]
    number_ios: Option<u64>,

    /// Flush after so many writes per queue, or creates and appends per thread
    #[arg(long, value_name = "N", default_value_t = 0)]
    fsync: u32,

    /// Write patterns, check every read, and read everything back at the end
    #[arg(long)]
    verify: bool,

    /// Keep what each block should contain in this file, and go on from it
    #[arg(long, value_name = "FILE", requires = "verify")]
    verify_state: Option<PathBuf>,

    /// Send no load, only check what --verify-state says
    #[arg(long, requires = "verify_state")]
    verify_only: bool,

    /// Seed of the offsets
    #[arg(long, value_name = "N", default_value_t = 1)]
    randseed: u64,

    /// How to wait for completions
    #[arg(long, value_enum, default_value = "interrupt")]
    wait: WaitArg,

    /// Report this process's CPU time instead of the socket owner's; needed over TCP
    #[arg(
        long,
        alias = "server-pid",
        value_name = "PID",
        conflicts_with = "path"
    )]
    backend_pid: Option<u32>,

    /// Pin the workers to these CPUs, as taskset writes them (0,2-3)
    #[arg(long, value_name = "LIST")]
    cpus: Option<String>,

    /// Count requests that fail instead of stopping
    #[arg(long)]
    continue_on_error: bool,

    /// Refuse any load that would change the disk
    #[arg(long)]
    readonly: bool,

    /// Give up when no request completes for so long
    #[arg(long, value_name = "TIME", value_parser = parse_seconds, default_value = "30s")]
    timeout: Duration,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,

    /// Add what was measured to a run directory, which is made if need be:
    /// `fathom report RUN` compares all that it holds
    #[arg(long, value_name = "RUN", conflicts_with = "info")]
    output: Option<PathBuf>,

    /// Put descriptor chains into the ring itself
    #[arg(long, help_heading = "vhost-user")]
    no_indirect: bool,

    /// Do not negotiate EVENT_IDX
    #[arg(long, help_heading = "vhost-user")]
    no_event_idx: bool,

    /// Largest data descriptor [default: one for the whole buffer]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "vhost-user")]
    segment_size: Option<u64>,

    /// Negotiate in-flight tracking
    #[arg(long, help_heading = "vhost-user")]
    inflight: bool,

    /// Switch the dirty log on and check that it is complete
    #[arg(long, help_heading = "vhost-user")]
    log: bool,

    /// When the server dies, wait for it for so long; implies --inflight
    #[arg(
        long,
        value_name = "TIME",
        value_parser = parse_seconds,
        num_args = 0..=1,
        default_missing_value = "30s",
        require_equals = true,
        help_heading = "vhost-user"
    )]
    reconnect: Option<Duration>,

    /// Form of NBD's requests and replies [default: the best that the server has]
    #[arg(
        long,
        value_enum,
        conflicts_with_all = ["path", "vhost_user"],
        help_heading = "NBD"
    )]
    replies: Option<RepliesArg>,

    /// raw: load the bytes of an image's file as they are. The disk in an
    /// image is loaded through a server
    #[arg(long, value_name = "FORMAT", value_parser = ["raw"], help_heading = "File")]
    format: Option<String>,

    /// Write although a file holds data, to a device, or to an NBD export that
    /// has other users
    #[arg(long)]
    overwrite: bool,

    /// How to reach the file
    #[arg(
        long,
        alias = "ioengine",
        value_enum,
        default_value = "io_uring",
        help_heading = "File"
    )]
    engine: EngineArg,

    /// Go through the page cache instead of O_DIRECT
    #[arg(long, help_heading = "File")]
    buffered: bool,

    /// Register the buffers with io_uring
    #[arg(long, help_heading = "File")]
    fixedbufs: bool,

    /// Register the file with io_uring
    #[arg(long, help_heading = "File")]
    registerfiles: bool,

    #[command(flatten)]
    files: FilesArgs,

    #[command(flatten)]
    together: Clients,

    #[command(flatten)]
    noise: Noise,
}

/// fio's words for a kind of load.
fn rw() -> impl TypedValueParser<Value = Rw> {
    let words = Rw::ALL.map(|rw| match rw {
        Rw::ReadWrite => PossibleValue::new(rw.name()).alias("readwrite"),
        _ => PossibleValue::new(rw.name()),
    });
    PossibleValuesParser::new(words).try_map(|word| word.parse::<Rw>())
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum WaitArg {
    Interrupt,
    Poll,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RepliesArg {
    Simple,
    Structured,
    Extended,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EngineArg {
    #[value(name = "io_uring")]
    IoUring,
    Libaio,
    Psync,
}

impl BenchArgs {
    /// Without a number of requests, load ends after some time.
    fn time_or(&self, given: Option<Duration>, seconds: u64) -> Option<Duration> {
        let by_count = self.number_ios.is_some();
        given.or((!by_count).then_some(Duration::from_secs(seconds)))
    }

    fn bs(&self) -> anyhow::Result<u32> {
        u32::try_from(self.bs).context("--bs is too large")
    }

    fn cpus(&self) -> anyhow::Result<Vec<usize>> {
        let Some(list) = &self.cpus else {
            return Ok(Vec::new());
        };
        parse_cpu_list(list).context("--cpus: write for example 0,2-3")
    }

    fn load(&self) -> anyhow::Result<Load> {
        Ok(Load {
            rw: self.rw,
            rwmixread: self.rwmixread,
            rwmixtrim: self.rwmixtrim,
            rwmixzero: self.rwmixzero,
            bs: self.bs()?,
            iodepth: self.iodepth,
            queues: self.queues,
            runtime: self.time_or(self.runtime, 10),
            ramp: self.time_or(self.ramp_time, 1).unwrap_or_default(),
            offset: self.offset,
            size: self.size,
            number_ios: self.number_ios,
            fsync: self.fsync,
            verify: self.verify,
            verify_state: self.verify_state.clone(),
            verify_only: self.verify_only,
            seed: self.randseed,
            cpus: self.cpus()?,
            continue_on_error: self.continue_on_error,
            readonly: self.readonly,
            timeout: self.timeout,
            ..Load::default()
        })
    }

    /// A load on the files in a directory, if that is what is asked for.
    fn mail_server(&self) -> anyhow::Result<Option<MailServer>> {
        let Some(dir) = self.path.as_ref().filter(|_| self.files.is_asked_for()) else {
            return Ok(None);
        };
        Ok(Some(MailServer {
            threads: self.queues,
            bs: self.bs()?,
            runtime: self.time_or(self.runtime, 10),
            number_ios: self.number_ios,
            fsync: self.fsync,
            direct: !self.buffered,
            verify: self.verify,
            seed: self.randseed,
            cpus: self.cpus()?,
            ..self.files.options(dir)?
        }))
    }

    fn target(&self) -> anyhow::Result<Target> {
        let wait = match self.wait {
            WaitArg::Interrupt => Wait::Interrupt,
            WaitArg::Poll => Wait::Poll,
        };
        match (&self.vhost_user, &self.nbd, &self.path) {
            (Some(socket), ..) => Ok(Target::VhostUser(VhostUser {
                queue_size: self.queue_size,
                wait,
                indirect: !self.no_indirect,
                event_idx: !self.no_event_idx,
                segment_size: match self.segment_size {
                    Some(size) => Some(size.try_into().context("--segment-size is too large")?),
                    None => None,
                },
                inflight: self.inflight || self.reconnect.is_some(),
                log: self.log,
                reconnect: self.reconnect,
                backend_pid: self.backend_pid,
                ..VhostUser::new(socket)
            })),
            (None, Some(uri), _) => Ok(Target::Nbd(Nbd {
                replies: self.replies.map(|replies| match replies {
                    RepliesArg::Simple => Replies::Simple,
                    RepliesArg::Structured => Replies::Structured,
                    RepliesArg::Extended => Replies::Extended,
                }),
                wait,
                backend_pid: self.backend_pid,
                ..Nbd::new(uri.clone())
            })),
            (None, None, Some(path)) => Ok(Target::File(File {
                engine: match self.engine {
                    EngineArg::IoUring => Engine::IoUring,
                    EngineArg::Libaio => Engine::Aio,
                    EngineArg::Psync => Engine::Psync,
                },
                buffered: self.buffered,
                fixedbufs: self.fixedbufs,
                registerfiles: self.registerfiles,
                wait,
                raw: self.format.is_some(),
                overwrite: self.overwrite,
                ..File::new(path)
            })),
            (None, None, None) => bail!("give a PATH, --vhost-user SOCKET or --nbd URI"),
        }
    }
}

/// Runs the load and prints the result on stdout; when a signal ends it early,
/// that of what was measured until then.
pub fn run(args: BenchArgs) -> anyhow::Result<()> {
    let others = &args.together;
    if let (Some(address), Some(certificates)) = (&others.serve, &others.certificates) {
        return together::serve(&args, address, certificates);
    }
    if !others.client.is_empty() {
        return on_other_hosts(&args);
    }
    if let Some(dir) = &args.output {
        record::check(dir)?;
    }
    if let Some(mut options) = args.mail_server()? {
        options.stop = stop_on_signal()?;
        let mut line = ProgressLine::new();
        let result = fathom_load::files::run(&options, &mut |p| line.show(p));
        line.clear();
        let report = result?;
        show(&report, args.json)?;
        return match &args.output {
            Some(dir) => record::add(dir, Record::of_files(&report)),
            None => Ok(()),
        };
    }
    let mut options = Options {
        target: args.target()?,
        load: args.load()?,
    };
    if args.info {
        return match &options.target {
            Target::VhostUser(server) => show(&fathom_load::info(&server.socket)?, args.json),
            Target::Nbd(server) => show(&fathom_load::nbd_info(server)?, args.json),
            Target::File(_) => bail!("--info needs --vhost-user or --nbd"),
        };
    }
    if let Target::Nbd(server) = &options.target
        && options.load.writes()
        && !args.overwrite
    {
        users::refuse(server)?;
    }
    options.load.stop = stop_on_signal()?;
    let mut line = ProgressLine::new();
    let result = fathom_load::run(&options, &mut |p| line.show(p));
    line.clear();
    let mut report = result?;
    // For who merges it, and long.
    report
        .operations
        .iter_mut()
        .for_each(|one| one.histogram.clear());
    show(&report, args.json)?;
    if let Some(dir) = &args.output {
        record::add(dir, Record::of(&report))?;
    }
    if report.errors > 0 {
        bail!("{} requests failed", report.errors);
    }
    Ok(())
}

/// Prints what agents on other hosts have measured.
fn on_other_hosts(args: &BenchArgs) -> anyhow::Result<()> {
    let mut load = args.load()?;
    load.stop = stop_on_signal()?;
    if !args.noise.noise.is_empty() {
        return show(&args.noise.run(&args.together, &load)?, args.json);
    }
    let mut told = match &args.together.fio {
        Some(job) => together::run_fio(&args.together.client, job, &load.stop)?,
        None => together::run(&args.together, &args.together.parts(&load))?,
    };
    told.merge();
    show(&told, args.json)?;
    let problems = told.problems();
    problems
        .iter()
        .for_each(|problem| eprintln!("fathom: {}", fathom_img::shown(problem)));
    match (problems.len(), told.errors()) {
        (0, 0) => Ok(()),
        (0, errors) => bail!("{errors} requests failed"),
        (failed, _) => bail!("{failed} hosts have no figures"),
    }
}

fn show(what: &(impl Display + Serialize), json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(what)?)?,
        false => write!(out, "{what}")?,
    }
    Ok(out.flush()?)
}

/// One line on the terminal that is written over and over.
struct ProgressLine {
    enabled: bool,
}

impl ProgressLine {
    fn new() -> ProgressLine {
        ProgressLine {
            enabled: std::io::stderr().is_terminal(),
        }
    }

    fn show(&mut self, p: &Progress) {
        if !self.enabled {
            return;
        }
        let phase = match p.phase {
            Phase::Ramp => "ramping up",
            Phase::Measure => "measuring",
            Phase::Stop | Phase::Abort => "finishing",
        };
        let total = p
            .total
            .map_or(String::new(), |t| format!("/{}", t.as_secs()));
        let mut err = std::io::stderr().lock();
        let _ = write!(
            err,
            "\r\x1b[K{phase} {}{total} s, {:.0} IOPS, {} requests",
            p.elapsed.as_secs(),
            p.iops,
            p.completed
        );
        let _ = err.flush();
    }

    fn clear(&self) {
        if self.enabled {
            eprint!("\r\x1b[K");
        }
    }
}
