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
use rustls::{ClientConnection, StreamOwned};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
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

/// Problem of a host whose thread has panicked.
const PANICKED: &str = "the thread for this host has panicked";

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
    let ready = all_ready(parts, |part| {
        let terms = Terms::of(&part.load)?;
        prepare(args, &part.host, &terms)
    })?;
    let started: Vec<_> = parts.iter().zip(ready).collect();
    let ended = at_once(started, |(part, wire)| go(wire, &part.load));
    let (mut told, mut begins) = (Told::default(), Vec::new());
    for (part, ended) in parts.iter().zip(ended) {
        let host = part.host.clone();
        match ended {
            Some(Ok((gone, done))) => {
                let began = done.began_us.map(Duration::from_micros);
                begins.push(began.map(|began| (gone.told + began, gone.heard + began)));
                told.hosts.push(Host::of(host, done.report));
            }
            Some(Err(error)) => told.fail(host, &format!("{error:#}")),
            None => told.fail(host, PANICKED),
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

/// Prepares all hosts at the same time. Returns what `prepare` returned for each of them.
///
/// # Errors
///
/// Fails with the names of the hosts that are not ready, after all have been tried: no load starts
/// unless all hosts are ready.
fn all_ready<T: Send>(
    parts: &[Part],
    prepare: impl Fn(&Part) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Vec<T>> {
    let (mut ready, mut refusals) = (Vec::new(), Vec::new());
    for (part, prepared) in parts.iter().zip(at_once(parts.iter().collect(), prepare)) {
        let prepared = prepared.unwrap_or_else(|| Err(anyhow!(PANICKED)));
        match prepared {
            Ok(one) => ready.push(one),
            Err(error) => refusals.push(format!("{}: {error:#}", part.host)),
        }
    }
    refusals.sort();
    let Some(first) = refusals.first() else {
        return Ok(ready);
    };
    let more = match refusals.len() {
        1 => String::new(),
        n => format!(" (and {} more)", n - 1),
    };
    bail!("{first}{more}; no load was started")
}

/// Calls `work` for each item in a thread of its own, and waits for all of them. Returns `None` for
/// an item whose thread has panicked.
///
/// No thread waits for another one: a barrier would never open after a panic.
fn at_once<I: Send, T: Send>(items: Vec<I>, work: impl Fn(I) -> T + Sync) -> Vec<Option<T>> {
    std::thread::scope(|scope| {
        let work = &work;
        let all: Vec<_> = { items.into_iter() }
            .map(|item| scope.spawn(move || work(item)))
            .collect();
        all.into_iter().map(|one| one.join().ok()).collect()
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(hosts: &[&str]) -> Vec<Part> {
        let part = |host: &&str| Part {
            host: (*host).to_owned(),
            load: Load::default(),
        };
        hosts.iter().map(part).collect()
    }

    #[test]
    fn host_whose_thread_panics_stops_no_other_host() {
        let hosts = parts(&["good", "late", "panics"]);
        let prepare = |part: &Part| match &*part.host {
            "panics" => panic!("as expected by this test"),
            "late" => bail!("no reply"),
            host => Ok(host.to_owned()),
        };
        let error = all_ready(&hosts, prepare).unwrap_err().to_string();
        assert_eq!(error, "late: no reply (and 1 more); no load was started");
        assert_eq!(all_ready(&hosts[..1], prepare).unwrap(), ["good"]);
        let error = all_ready(&hosts[2..], prepare).unwrap_err().to_string();
        assert!(error.contains("panics: the thread"), "{error}");
        let ended = at_once(hosts, |part| {
            assert_ne!(part.host, "panics", "as expected by this test");
            part.host
        });
        let ended: Vec<_> = ended.iter().map(|one| one.as_deref()).collect();
        assert_eq!(ended, [Some("good"), Some("late"), None]);
    }
}
