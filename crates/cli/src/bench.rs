//! `fathom bench`: converts options with fio's names to options of the load generator.

mod files;
mod progress_line;
mod record;
mod together;
mod users;

use self::files::FilesArgs;
use self::progress_line::ProgressLine;
use self::record::Record;
use self::together::{Clients, Noise};
use std::fmt::Display;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use crate::breakdown::stop_on_signal;
use anyhow::{Context, bail};
use clap::builder::{ArgPredicate, PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args, ValueEnum};
use fathom_load::files::Options as MailServer;
use fathom_load::{
    Engine, File, Load, Nbd, NbdUri, Options, Replies, Rw, Target, VhostUser, Wait, parse_cpu_list,
};
use fathom_units::{parse_seconds, parse_size};
use serde::Serialize;

/// Measure a server, a file or a file system
///
/// The options have the names of fio. Ctrl-C stops the load and prints the result until then.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("target").required(true).args(["path", "vhost_user", "nbd", "client"]))]
pub struct BenchArgs {
    /// File or block device of this host, or with --workload a directory
    path: Option<PathBuf>,

    /// Socket of a vhost-user-blk server to measure, such as /run/vm1.sock
    #[arg(long, value_name = "SOCKET", help_heading = "Target")]
    vhost_user: Option<PathBuf>,

    /// URI of an NBD server to measure: nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH
    #[arg(long, value_name = "URI", help_heading = "Target")]
    nbd: Option<NbdUri>,

    /// Print the features of the server and exit
    #[arg(long, conflicts_with = "path", help_heading = "Target")]
    info: bool,

    /// Allow writes to a file with data, to a device, or to an NBD export with other clients
    #[arg(long, help_heading = "Target")]
    overwrite: bool,

    /// Refuse loads that change the disk
    #[arg(long, help_heading = "Target")]
    readonly: bool,

    /// Kind of load
    #[arg(long, default_value = "randread", value_parser = rw(), help_heading = "Load")]
    rw: Rw,

    /// Bytes per request, such as 64k; the default with --workload is 8k
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = parse_size,
        default_value = "4k",
        default_value_if("workload", ArgPredicate::IsPresent, "8k"),
        help_heading = "Load"
    )]
    bs: u64,

    /// Requests in flight per queue
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Load")]
    iodepth: u16,

    /// Number of virtqueues, NBD connections, or threads on a file
    #[arg(
        long,
        aliases = ["numjobs", "connections", "threads"],
        value_name = "N",
        default_value_t = 1,
        help_heading = "Load"
    )]
    queues: u16,

    /// Time to measure, such as 30s [default: 10s, without limit with --number-ios]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds, help_heading = "Load")]
    runtime: Option<Duration>,

    /// Time of load before the measurement [default: 1s, none with --number-ios]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds, help_heading = "Load")]
    ramp_time: Option<Duration>,

    /// Bytes of the disk to use, such as 1G [default: all after --offset]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Load")]
    size: Option<u64>,

    /// First byte of the disk to use, such as 1G
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0", help_heading = "Load")]
    offset: u64,

    /// Number of requests per queue after which the load ends [default: none]
    #[arg(long, value_name = "N", help_heading = "Load")]
    number_ios: Option<u64>,

    /// Percentage of reads in the loads rw and randrw
    #[arg(
        long,
        value_name = "PERCENT",
        default_value_t = 50,
        help_heading = "Load"
    )]
    rwmixread: u8,

    /// Percentage of discards among all requests of a load that writes
    #[arg(
        long,
        value_name = "PERCENT",
        default_value_t = 0,
        help_heading = "Load"
    )]
    rwmixtrim: u8,

    /// Percentage of write-zeroes requests among all requests of a load that writes
    #[arg(
        long,
        value_name = "PERCENT",
        default_value_t = 0,
        help_heading = "Load"
    )]
    rwmixzero: u8,

    /// Number of writes per queue after which to flush, 0 for never
    ///
    /// With --workload: number of creates and appends per thread.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Load")]
    fsync: u32,

    /// Seed of the random offsets
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Load")]
    randseed: u64,

    /// How to wait for completions
    #[arg(long, value_enum, default_value = "interrupt", help_heading = "Load")]
    wait: WaitArg,

    /// CPUs to pin the threads to, such as 0,2-3
    #[arg(long, value_name = "LIST", help_heading = "Load")]
    cpus: Option<String>,

    /// Count failed requests instead of stopping
    #[arg(long, help_heading = "Load")]
    continue_on_error: bool,

    /// Time without a completed request after which the command fails
    #[arg(long, value_name = "TIME", value_parser = parse_seconds, default_value = "30s",
          help_heading = "Load")]
    timeout: Duration,

    /// Write patterns, verify every read, and read all data back at the end
    ///
    /// With --buffered, reads during the load come from the page cache. Before the data is read
    /// back at the end, it is written back and dropped from the page cache.
    #[arg(long, help_heading = "Verification")]
    verify: bool,

    /// File with the expected contents of each block, to continue in a later run
    #[arg(
        long,
        value_name = "FILE",
        requires = "verify",
        help_heading = "Verification"
    )]
    verify_state: Option<PathBuf>,

    /// Verify the contents of --verify-state without a load
    #[arg(long, requires = "verify_state", help_heading = "Verification")]
    verify_only: bool,

    /// Print the result as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,

    /// Run directory to add the result to; it is created if it does not exist
    ///
    /// `fathom report RUN` compares all results in it.
    #[arg(
        long,
        value_name = "RUN",
        conflicts_with = "info",
        help_heading = "Output"
    )]
    output: Option<PathBuf>,

    /// Process whose CPU time to report [default: the owner of the socket]
    ///
    /// Needed for NBD servers on TCP.
    #[arg(
        long,
        alias = "server-pid",
        value_name = "PID",
        conflicts_with = "path",
        help_heading = "Output"
    )]
    backend_pid: Option<u32>,

    /// Number of entries of a virtqueue [default: as --iodepth needs, at least 128]
    #[arg(long, value_name = "N", help_heading = "vhost-user")]
    queue_size: Option<u16>,

    /// Use packed rings, which the server must offer
    #[arg(long, action = clap::ArgAction::Set, value_name = "on|off", value_parser = on_off(), default_value = "off",
          hide_default_value = true, hide_possible_values = true,
          help = "Use packed rings, which the server must offer [default: off]",
          help_heading = "vhost-user")]
    packed: bool,

    /// Do not use indirect descriptors
    #[arg(long, help_heading = "vhost-user")]
    no_indirect: bool,

    /// Do not negotiate EVENT_IDX
    #[arg(long, help_heading = "vhost-user")]
    no_event_idx: bool,

    /// Largest data descriptor in bytes, such as 4k [default: the whole buffer]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "vhost-user")]
    segment_size: Option<u64>,

    /// Negotiate in-flight tracking
    #[arg(long, help_heading = "vhost-user")]
    inflight: bool,

    /// Enable the dirty log and verify that it is complete
    #[arg(long, help_heading = "vhost-user")]
    log: bool,

    /// Reconnect if the server restarts within this time [default without =TIME: 30s]
    ///
    /// Implies --inflight.
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

    /// Form of requests and replies [default: the best that the server offers]
    #[arg(
        long,
        value_enum,
        conflicts_with_all = ["path", "vhost_user"],
        help_heading = "NBD"
    )]
    replies: Option<RepliesArg>,

    /// Use the bytes of an image file as they are
    ///
    /// To measure the disk in an image, measure a server of the image.
    #[arg(long, value_name = "FORMAT", value_parser = ["raw"], help_heading = "File")]
    format: Option<String>,

    /// Kind of I/O on the file
    #[arg(
        long,
        alias = "ioengine",
        value_enum,
        default_value = "io_uring",
        help_heading = "File"
    )]
    engine: EngineArg,

    /// Use the page cache instead of O_DIRECT
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

/// Describes a kind of load.
fn about(rw: Rw) -> &'static str {
    match rw {
        Rw::Read => "Sequential reads",
        Rw::Write => "Sequential writes",
        Rw::Trim => "Sequential discards",
        Rw::RandRead => "Random reads",
        Rw::RandWrite => "Random writes",
        Rw::RandTrim => "Random discards",
        Rw::ReadWrite => "Sequential reads and writes",
        Rw::RandRw => "Random reads and writes",
    }
}

/// Kinds of load, by fio's names.
fn rw() -> impl TypedValueParser<Value = Rw> {
    let words = Rw::ALL.map(|rw| {
        let word = PossibleValue::new(rw.name()).help(about(rw));
        match rw {
            Rw::ReadWrite => word.alias("readwrite"),
            _ => word,
        }
    });
    PossibleValuesParser::new(words).try_map(|word| word.parse::<Rw>())
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum WaitArg {
    /// Sleep until an interrupt or a reply
    Interrupt,
    /// Poll without sleeping
    Poll,
}

/// Parses `on` or `off`.
fn on_off() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|value| value == "on")
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RepliesArg {
    /// Simple replies
    Simple,
    /// Structured replies
    Structured,
    /// Extended headers
    Extended,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EngineArg {
    /// io_uring
    #[value(name = "io_uring")]
    IoUring,
    /// Linux AIO
    Libaio,
    /// pread and pwrite
    Psync,
}

impl BenchArgs {
    /// Returns the given time, else `seconds`; no limit if --number-ios limits the load.
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

    /// Returns the options of a load on the files of a directory, if --workload is given.
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
                packed: self.packed,
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
            (None, None, None) => {
                bail!("no target given; name PATH, --vhost-user SOCKET or --nbd URI")
            }
        }
    }
}

/// Runs the load and prints the result on stdout.
///
/// After a signal, the result covers the time until the signal.
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
        let record = Record::of_files(&report);
        record.answer(args.json)?;
        show(&report, args.json)?;
        return record.keep(args.output.as_deref());
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
    // The histograms are long, and only programs that merge reports need them.
    report
        .operations
        .iter_mut()
        .for_each(|one| one.histogram.clear());
    let record = Record::of(&report);
    record.answer(args.json)?;
    show(&report, args.json)?;
    record.keep(args.output.as_deref())?;
    if report.errors > 0 {
        bail!("{} requests failed", report.errors);
    }
    Ok(())
}

/// Runs the load with agents on other hosts and prints the merged result.
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
