//! `fathom bench --client`: starts loads on several agents at one instant.

use super::PORT;
use super::terms::Terms;
use super::told::{Host, Told};
use super::wire::{Done, Message, Wire};
use anyhow::{Context, anyhow, bail};
use clap::{ArgGroup, Args};
use fathom_client::split_host;
use fathom_load::Load;
use fathom_tls::{ClientFiles, ClientTls, open_here};
use parking_lot::Mutex;
use rustls::{ClientConnection, StreamOwned};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Timeout for each step before the load.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval at which the client checks whether to stop early.
const LOOK: Duration = Duration::from_millis(200);
/// Time for an agent to stop and report, in addition to the duration of its load.
const LATE: Duration = Duration::from_secs(60);

#[derive(Args, Debug)]
#[command(group = ArgGroup::new("way").args(["certificates", "fio"]))]
pub struct Clients {
    /// Hosts to run the load on at the same time, such as host1,host2:9000
    ///
    /// `fathom bench --serve` must run on each host. The results are merged. [default port: 9827]
    #[arg(
        long,
        value_name = "HOST,...",
        value_delimiter = ',',
        requires = "way",
        conflicts_with_all = ["info", "workload", "output"],
        help_heading = "Many hosts"
    )]
    pub client: Vec<String>,

    /// Address to listen on for `fathom bench --client` on other hosts, such as 0.0.0.0:9827
    ///
    /// The agent runs the loads of the clients on PATH, --vhost-user or --nbd, one at a time.
    #[arg(
        long,
        value_name = "HOST:PORT",
        requires = "certificates",
        conflicts_with_all = ["client", "info", "workload", "output", "json"],
        help_heading = "Many hosts"
    )]
    pub serve: Option<String>,

    /// Directory with certificates
    ///
    /// ca-cert.pem; for --client also client-cert.pem and client-key.pem, for --serve
    /// server-cert.pem and server-key.pem.
    #[arg(long, value_name = "DIR", help_heading = "Many hosts")]
    pub certificates: Option<PathBuf>,

    /// Job file of fio to run on the hosts of --client instead of Fathom's load
    ///
    /// `fio --server` must run on each host. The job file has all options of the load. fio does not
    /// use certificates. [default port: 8765]
    #[arg(
        long,
        value_name = "JOBFILE",
        requires = "client",
        conflicts_with_all = ["tls_hostname", "rw", "bs", "iodepth", "queues", "runtime", "verify"],
        help_heading = "Many hosts"
    )]
    pub fio: Option<PathBuf>,

    /// Name in the certificates of the agents [default: the name of each host]
    #[arg(
        long,
        value_name = "NAME",
        requires = "client",
        help_heading = "Many hosts"
    )]
    pub tls_hostname: Option<String>,
}

type Socket = StreamOwned<ClientConnection, TcpStream>;

/// When the client sent the start message to a host, and when it received the confirmation.
#[derive(Clone, Copy)]
struct Gone {
    told: Instant,
    heard: Instant,
}

/// A host and its load.
#[derive(Clone)]
pub struct Part {
    pub host: String,
    pub load: Load,
}

impl Clients {
    /// Returns all hosts, each once, with the same load.
    pub fn parts(&self, load: &Load) -> Vec<Part> {
        let mut hosts = self.client.clone();
        hosts.sort();
        hosts.dedup();
        let part = |host| Part {
            host,
            load: load.clone(),
        };
        hosts.into_iter().map(part).collect()
    }
}

/// Runs the loads and returns the unmerged results of all hosts.
///
/// # Errors
///
/// Fails before any load has started if one of the hosts cannot run its load.
pub fn run(args: &Clients, parts: &[Part]) -> anyhow::Result<Told> {
    // No load starts unless all hosts are ready.
    let (ready, refusals) = (Barrier::new(parts.len()), Mutex::new(Vec::new()));
    let one = |Part { host, load }: &Part| {
        let wire = Terms::of(load).and_then(|terms| prepare(args, host, &terms));
        let wire = wire.map_err(|error| refusals.lock().push(format!("{host}: {error:#}")));
        ready.wait();
        match wire {
            Ok(wire) if refusals.lock().is_empty() => Some(go(wire, load)),
            _ => None,
        }
    };
    let ended: Vec<_> = std::thread::scope(|scope| {
        let one = &one;
        let all: Vec<_> = parts
            .iter()
            .map(|part| scope.spawn(move || one(part)))
            .collect();
        all.into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect()
    });
    let mut refusals = refusals.into_inner();
    refusals.sort();
    if let Some(first) = refusals.first() {
        let more = match refusals.len() {
            1 => String::new(),
            n => format!(" (and {} more)", n - 1),
        };
        bail!("{first}{more}; no load was started");
    }
    let (mut told, mut begins) = (Told::default(), Vec::new());
    for (part, ended) in parts.iter().zip(ended) {
        let host = part.host.clone();
        match ended.ok().flatten() {
            Some(Ok((gone, done))) => {
                let began = done.began_us.map(Duration::from_micros);
                begins.push(began.map(|began| (gone.told + began, gone.heard + began)));
                told.hosts.push(Host::of(host, done.report));
            }
            Some(Err(error)) => told.fail(host, &format!("{error:#}")),
            None => told.fail(host, "the thread for this host has panicked"),
        }
    }
    // The hosts' clocks are unknown. But each load began between two bounds: its delay after the
    // start message was sent, and its delay after the confirmation was received.
    let begins: Option<Vec<_>> = begins.into_iter().collect();
    told.spread = begins.and_then(|begins| {
        let first = begins.iter().map(|(earliest, _)| *earliest).min()?;
        let last = begins.iter().map(|(_, latest)| *latest).max()?;
        Some(last - first)
    });
    Ok(told)
}

/// Connects to an agent and sends the load; returns when the agent is ready to start.
fn prepare(args: &Clients, host: &str, terms: &Terms) -> anyhow::Result<Wire<Socket>> {
    let (name, port) = split_host(host, PORT).context("not HOST or HOST:PORT")?;
    let files = ClientFiles::of(args.certificates.as_deref());
    let tls = ClientTls::load(
        &files,
        args.tls_hostname.as_ref().unwrap_or(&name),
        &open_here,
    )?;
    let addresses = (&*name, port).to_socket_addrs()?;
    let mut failed = anyhow!("no address found");
    for address in addresses {
        let socket = match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(socket) => socket,
            Err(error) => {
                failed = error.into();
                continue;
            }
        };
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        let mut wire = Wire::new(StreamOwned::new(tls.session()?, socket));
        wire.send(&Message::Load(Box::new(terms.clone())))?;
        return match wire.receive()? {
            Message::Ready { .. } => Ok(wire),
            other => Err(refusal(other)),
        };
    }
    Err(failed)
}

fn refusal(message: Message) -> anyhow::Error {
    match message {
        Message::Failed { problem } => anyhow!("{problem}"),
        _ => anyhow!("unexpected message"),
    }
}

/// Starts the load and waits for its result.
fn go(mut wire: Wire<Socket>, load: &Load) -> anyhow::Result<(Gone, Done)> {
    let told = Instant::now();
    wire.send(&Message::Go)?;
    match wire.receive()? {
        Message::Going => {}
        other => return Err(refusal(other)),
    }
    let heard = Instant::now();
    wire.stream().sock.set_read_timeout(Some(LOOK))?;
    let ends = load
        .runtime
        .map(|runtime| heard + load.ramp + runtime + load.timeout + LATE);
    let (mut is_stopping, mut ends) = (false, ends);
    loop {
        match wire.try_receive()? {
            Some(Message::Done(done)) => return Ok((Gone { told, heard }, *done)),
            Some(other) => return Err(refusal(other)),
            None if ends.is_some_and(|ends| Instant::now() > ends) => {
                bail!("the load does not end")
            }
            None => {}
        }
        if load.stop.load(Ordering::Relaxed) && !is_stopping {
            wire.send(&Message::Stop)?;
            is_stopping = true;
            ends = Some(Instant::now() + load.timeout + LATE);
        }
    }
}
