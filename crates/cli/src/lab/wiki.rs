//! `fathom lab run wiki`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use fathom_daemon::size::parse_size;
use fathom_lab::Aio;
use fathom_lab::scenario::wiki::{self, Injection, Options, Server, Transport};
use fathom_lab::workload::{Limit, Rw};
use fathom_report::{analyse, render};

use crate::bench::parse_duration;

#[derive(Debug, Args)]
pub struct WikiArgs {
    /// Who serves the disk: fathom, qemu (virtio-blk in an I/O thread) or qsd
    /// (qemu-storage-daemon)
    #[arg(long, default_value = "fathom")]
    disk: Server,
    /// How the server reads and writes the image
    #[arg(long, value_enum, default_value = "io_uring")]
    aio: AioArg,
    /// How the guest reaches its disk: modern, legacy (an I/O port), no-ioeventfd,
    /// intx (no MSI-X)
    #[arg(long, default_value = "modern", hide_short_help = true)]
    transport: Transport,
    /// read, write, randread or randwrite
    #[arg(long, default_value = "read")]
    rw: Rw,
    /// Bytes of a request
    #[arg(long, default_value = "4k", value_parser = parse_size)]
    bs: u64,
    /// Requests in flight
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    iodepth: u32,
    /// Request queues of the disk
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: u16,
    /// Pairs of a traced and an untraced round
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Requests in a round [default: 10000, fewer where everything is emulated]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Seconds of a round, instead of a number of requests
    #[arg(long, conflicts_with = "count", value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: Option<u64>,
    /// Let the server poll for requests before it sleeps
    #[arg(long)]
    poll: bool,
    /// Size of the image that is made for the run
    #[arg(long, value_parser = parse_size)]
    size: Option<u64>,
    /// The run directory to make [default: fathom-wiki-TIME.run here]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Delay every other request, to check the instrument: guest, storage, queue or notify=TIME
    #[arg(long, value_name = "PLACE=TIME", value_parser = parse_injection, hide_short_help = true)]
    inject: Option<Injection>,
    /// Put a filter before Fathom's disk (see `fathom filters`); repeatable
    #[arg(long = "filter", value_name = "NAME:KEY=VALUE,...")]
    filters: Vec<String>,
    /// Only the pairs: no rounds on the host, of system calls, and of QEMU's events
    #[arg(long, hide_short_help = true)]
    pairs_only: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Runs in the KVM host that an outer run has booted, which prints the report
    #[arg(long, hide = true)]
    nested: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum AioArg {
    IoUring,
    Native,
    Threads,
}

impl From<AioArg> for Aio {
    fn from(aio: AioArg) -> Aio {
        match aio {
            AioArg::IoUring => Aio::IoUring,
            AioArg::Native => Aio::Native,
            AioArg::Threads => Aio::Threads,
        }
    }
}

fn parse_injection(text: &str) -> Result<Injection, String> {
    let (place, delay) = text
        .split_once('=')
        .ok_or_else(|| format!("'{text}' is no place with a time, such as storage=100ms"))?;
    let (place, delay) = (place.parse()?, parse_duration(delay)?);
    if delay > Duration::from_secs(10) {
        return Err("a delay of more than 10s is not injected".into());
    }
    Ok(Injection { place, delay })
}

impl WikiArgs {
    /// Where the run directory will be; from now on that is settled.
    pub fn settle_output(&mut self) -> PathBuf {
        let output = self.output.get_or_insert_with(wiki::default_output);
        output.clone()
    }

    fn into_options(self, fathom: PathBuf) -> Options {
        let limit = match (self.count, self.seconds) {
            (Some(count), _) => Some(Limit::Operations(count)),
            (None, Some(seconds)) => Some(Limit::Time(Duration::from_secs(seconds))),
            (None, None) => None,
        };
        Options {
            fathom,
            output: self.output.unwrap_or_else(wiki::default_output),
            server: self.disk,
            aio: self.aio.into(),
            transport: self.transport,
            rw: self.rw,
            block_size: self.bs,
            iodepth: self.iodepth,
            queues: self.queues,
            rounds: self.rounds,
            limit,
            poll: self.poll,
            inject: self.inject,
            filters: self.filters,
            size: self.size,
            pairs_only: self.pairs_only,
            is_nested: self.nested,
        }
    }
}

/// Runs the scenario; progress goes to standard error, the report to standard output.
pub fn run(args: WikiArgs) -> anyhow::Result<()> {
    let (nested, json) = (args.nested, args.json);
    let fathom = std::env::current_exe().context("cannot find this program's own file")?;
    let options = args.into_options(fathom);
    let dir = options.output.display();
    let ran = wiki::run(&options, &mut |step| eprintln!("lab: {step}"));
    if nested {
        return Ok(ran?);
    }
    if let Err(error) = ran {
        if options.output.join("run.json").is_file() {
            let text = error.to_string();
            let (line, tail) = text.split_once('\n').unwrap_or((&text, ""));
            bail!("{line}; what was measured before is in {dir}: fathom report {dir}\n{tail}");
        }
        return Err(error.into());
    }
    if json {
        let analysis = analyse(&options.output, &fathom_report::Options::default())?;
        println!("{}", render::json::render(&[&analysis]));
    } else {
        crate::report::print_run(&options.output)?;
    }
    eprintln!("lab: the run is in {dir}; fathom report {dir} prints it again");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use fathom_lab::scenario::wiki::Place;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        wiki: WikiArgs,
    }

    fn parse(args: &[String]) -> Options {
        let args = std::iter::once("wiki".to_owned()).chain(args.iter().cloned());
        let command = Command::try_parse_from(args).unwrap();
        command.wiki.into_options("/f".into())
    }

    /// The KVM host's run is the one that was asked for outside.
    #[test]
    fn options_survive_the_way_into_the_kvm_host() {
        let plain = Options::new("/f", "/var/tmp/run");
        assert_eq!(parse(&plain.to_args()), plain);
        let delay = Duration::from_micros(100_500);
        let inject = Some(Injection {
            place: Place::Notify,
            delay,
        });
        let odd = Options {
            server: Server::Qsd,
            aio: Aio::Native,
            transport: Transport::Legacy,
            rw: Rw::RandWrite,
            block_size: 8192,
            iodepth: 32,
            queues: 2,
            rounds: 7,
            limit: Some(Limit::Time(Duration::from_secs(9))),
            poll: true,
            inject,
            filters: vec!["delay:read=1ms,write=2ms".into(), "pause".into()],
            size: Some(1 << 30),
            pairs_only: true,
            is_nested: true,
            ..plain
        };
        assert_eq!(parse(&odd.to_args()), odd);
        let counted = Options {
            limit: Some(Limit::Operations(77)),
            ..odd.clone()
        };
        assert_eq!(parse(&counted.to_args()), counted);
    }
}
