//! `fathom bench --serve`: waits for clients, and runs their loads on this agent's target.

use super::wire::{Done, Message, Wire};
use crate::bench::{BenchArgs, users};
use anyhow::{Context, bail};
use fathom_load::{Options, Target};
use fathom_tls::server_config;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Timeout for a client's messages before its load runs.
const PATIENCE: Duration = Duration::from_secs(10);
/// Timeout for the client's start message, which it sends when all hosts are ready.
const READY: Duration = Duration::from_secs(120);
/// Maximum number of clients at a time.
const CLIENTS: usize = 16;

/// Held while a load runs: only one runs at a time.
static RUNNING: Mutex<()> = Mutex::new(());
static CONNECTED: AtomicUsize = AtomicUsize::new(0);

type Socket = StreamOwned<ServerConnection, TcpStream>;

/// Serves clients until the process ends.
pub fn serve(args: &BenchArgs, address: &str, certificates: &Path) -> anyhow::Result<()> {
    let options = Options {
        target: args.target()?,
        load: args.load()?,
    };
    let file = |name| certificates.join(name);
    let (cert, key) = (file("server-cert.pem"), file("server-key.pem"));
    let tls = server_config(&cert, &key, Some(&file("ca-cert.pem")))?;
    let listener = TcpListener::bind(address).with_context(|| format!("--serve {address}"))?;
    let at = listener.local_addr()?;
    eprintln!(
        "bench: other hosts can run loads on {}, by TLS at {at}",
        name_of(&options.target)
    );
    std::thread::scope(|scope| {
        loop {
            let Ok((client, peer)) = listener.accept() else {
                // The process may have too many open files, for example.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            };
            if CONNECTED.fetch_add(1, Ordering::Relaxed) >= CLIENTS {
                CONNECTED.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (options, tls) = (&options, tls.clone());
            scope.spawn(move || {
                if let Err(error) = attend(client, tls, options, args.overwrite) {
                    eprintln!("bench: {peer}: {error:#}");
                }
                CONNECTED.fetch_sub(1, Ordering::Relaxed);
            });
        }
    })
}

fn name_of(target: &Target) -> String {
    match target {
        Target::VhostUser(server) => server.socket.display().to_string(),
        Target::Nbd(server) => server.uri.to_string(),
        Target::File(file) => file.path.display().to_string(),
    }
}

fn attend(
    client: TcpStream,
    tls: Arc<ServerConfig>,
    options: &Options,
    may_overwrite: bool,
) -> anyhow::Result<()> {
    client.set_nodelay(true)?;
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let mut wire = Wire::new(StreamOwned::new(ServerConnection::new(tls)?, client));
    let Message::Load(terms) = wire.receive()? else {
        bail!("the request has no load");
    };
    let done = terms.load(options.load.clone()).and_then(|load| {
        let (target, stop) = (options.target.clone(), Arc::new(AtomicBool::new(false)));
        let load = fathom_load::Load { stop, ..load };
        run(&mut wire, &Options { target, load }, may_overwrite)
    });
    match done {
        Ok(done) => wire.send(&Message::Done(Box::new(done))),
        Err(error) => {
            let problem = format!("{error:#}");
            wire.send(&Message::Failed {
                problem: problem.clone(),
            })?;
            bail!("{problem}")
        }
    }
}

fn run(wire: &mut Wire<Socket>, options: &Options, may_overwrite: bool) -> anyhow::Result<Done> {
    let Some(_running) = RUNNING.try_lock() else {
        bail!("another load is running on this host");
    };
    options.validate()?;
    if let Target::Nbd(server) = &options.target
        && options.load.writes()
        && !may_overwrite
    {
        users::refuse(server)?;
    }
    let target = name_of(&options.target);
    wire.send(&Message::Ready { target })?;
    wire.stream().sock.set_read_timeout(Some(READY))?;
    let Message::Go = wire.receive()? else {
        bail!("the client has closed the connection");
    };
    let begin = Instant::now();
    wire.send(&Message::Going)?;
    let socket = wire.stream().sock.try_clone()?;
    let mut began = None;
    let report = fathom_load::run(options, &mut |progress| {
        began.get_or_insert_with(|| begin.elapsed().saturating_sub(progress.elapsed));
        // Any input from the client now is a request to stop, or the end of the connection.
        let mut polled = [PollFd::new(&socket, PollFlags::IN | PollFlags::RDHUP)];
        if poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
            options.load.stop.store(true, Ordering::Relaxed);
        }
    })?;
    let began_us = began.map(|began| began.as_micros() as u64);
    Ok(Done { report, began_us })
}
