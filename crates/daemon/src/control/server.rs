//! The daemon's end of the control socket. It never waits for a client: what
//! a client has not sent or not read yet is kept until it has, within bounds.

use super::{Ask, make_private_dir, remove_stale};
use crate::answer::{Answer, ClientId};
use crate::error::Error;
use crate::runtime;
use fathom_exports::{Access, Listener};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use serde_json::{Value, json};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest request, in bytes.
const MAX_LINE: usize = 16 << 10;
/// Clients at once. One more takes the place of the one that has been quiet
/// for longest, so that clients which hang keep nobody out.
const MAX_CLIENTS: usize = 32;
/// How long no client is accepted after that failed.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Does what a client asks. The answer comes by [`Server::answer`], at once or later.
pub type Handler<'a> = dyn FnMut(ClientId, Ask) + 'a;

/// Listens, and keeps the clients. Its socket is removed when it is dropped.
pub struct Server {
    listener: Listener,
    clients: Vec<Client>,
    next: u64,
    accept_again: Option<Instant>,
}

impl Server {
    /// Listen at `path`, for the same user only.
    pub fn bind(path: &Path) -> Result<Server, Error> {
        Ok(Server {
            listener: Listener::bind(path, Access::PRIVATE)?,
            clients: Vec::new(),
            next: 0,
            accept_again: None,
        })
    }

    /// Listen at a default path, whose directory is made if need be.
    pub fn bind_default(path: &Path) -> Result<Server, Error> {
        if let Some(dir) = path.parent() {
            let failed = |source| Error::Control {
                path: dir.to_owned(),
                source,
            };
            runtime::make_parent_of(dir).map_err(failed)?;
            make_private_dir(dir).map_err(failed)?;
            remove_stale(dir);
        }
        Server::bind(path)
    }

    /// What to poll for: the listener, then each client.
    pub fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let listening = match self.accept_again {
            Some(_) => PollFlags::empty(),
            None => PollFlags::IN,
        };
        let listener = PollFd::from_borrowed_fd(self.listener.as_fd(), listening);
        let clients = self.clients.iter().map(|client| {
            let wanted = match client.output.is_empty() {
                // (That it is gone is told in any case.)
                true if client.waits => PollFlags::empty(),
                true => PollFlags::IN,
                false => PollFlags::OUT,
            };
            PollFd::new(&client.socket, wanted)
        });
        std::iter::once(listener).chain(clients)
    }

    /// How long poll may wait at most.
    pub fn patience(&self) -> Option<Duration> {
        if self.clients.iter().any(Client::has_request) {
            return Some(Duration::ZERO);
        }
        let pause = self.accept_again?;
        Some(pause.saturating_duration_since(Instant::now()))
    }

    /// Go on with what poll found, given in the order of `poll_fds`.
    pub fn turn(&mut self, ready: &[PollFlags], handler: &mut Handler<'_>) {
        let (listener, clients) = ready.split_first().expect("poll_fds has a listener");
        for (client, ready) in self.clients.iter_mut().zip(clients) {
            client.turn(!ready.is_empty(), handler);
        }
        self.clients.retain(|client| !client.gone);
        if self.accept_again.is_some_and(|at| at <= Instant::now()) {
            self.accept_again = None;
        }
        if !listener.is_empty() {
            self.accept();
        }
    }

    /// What has come of a client's request. The client may be gone.
    pub fn answer(&mut self, to: ClientId, answer: Answer) {
        let client = self.clients.iter_mut().find(|client| client.id == to);
        if let Some(client) = client.filter(|client| client.waits) {
            client.waits = false;
            client.say_answer(answer);
        }
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match accept_with(&self.listener, flags) {
            Ok(socket) => {
                if self.clients.len() >= MAX_CLIENTS {
                    self.evict();
                }
                self.next += 1;
                let id = ClientId(self.next);
                self.clients.push(Client::new(id, socket.into()));
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(error) => {
                tracing::warn!("control socket: cannot accept a client: {error}");
                self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
            }
        }
    }

    fn evict(&mut self) {
        // Those that wait are not to blame for it, while there are others.
        let clients = self.clients.iter().enumerate();
        let quietest = clients.min_by_key(|(_, client)| (client.waits, client.active));
        if let Some((index, _)) = quietest {
            self.clients.swap_remove(index);
        }
    }
}

/// One connection.
struct Client {
    id: ClientId,
    socket: UnixStream,
    /// Received, but not handled.
    input: Vec<u8>,
    /// Answered, but not sent; while there is any, nothing is handled.
    output: Vec<u8>,
    /// When it last had a request handled, or connected.
    active: Instant,
    /// For an answer that comes later; until then, nothing is handled.
    waits: bool,
    /// Nothing more will come from it.
    ended: bool,
    gone: bool,
}

impl Client {
    /// `socket` does not block.
    fn new(id: ClientId, socket: UnixStream) -> Client {
        Client {
            id,
            socket,
            input: Vec::new(),
            output: Vec::new(),
            active: Instant::now(),
            waits: false,
            ended: false,
            gone: false,
        }
    }

    /// Whether it can go on without anything new from outside.
    fn has_request(&self) -> bool {
        let is_free = self.output.is_empty() && !self.waits;
        is_free && (self.ended || self.input.contains(&b'\n'))
    }

    /// One step: send, receive, handle at most one request.
    fn turn(&mut self, ready: bool, handler: &mut Handler<'_>) {
        if self.waits {
            self.gone = ready;
            return;
        }
        let result = if ready { self.transfer() } else { Ok(()) };
        if result.is_err() {
            self.gone = true;
            return;
        }
        if !self.output.is_empty() {
            return;
        }
        match self.next_line() {
            Some(line) if line.iter().all(u8::is_ascii_whitespace) => {}
            Some(line) => self.answer(&line, handler),
            None if self.ended => self.gone = true,
            None if self.input.len() > MAX_LINE => {
                self.say(&json!({ "error": "the request is too long" }));
                self.ended = true;
                self.input.clear();
            }
            None => {}
        }
    }

    fn transfer(&mut self) -> io::Result<()> {
        if self.send()? && !self.ended && self.input.len() <= MAX_LINE {
            self.receive()?;
        }
        Ok(())
    }

    /// True when everything is sent.
    fn send(&mut self) -> io::Result<bool> {
        while !self.output.is_empty() {
            match self.socket.write(&self.output) {
                Ok(n) => drop(self.output.drain(..n)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn receive(&mut self) -> io::Result<()> {
        let mut buffer = [0; 4096];
        match self.socket.read(&mut buffer) {
            Ok(0) => self.ended = true,
            Ok(n) => self.input.extend_from_slice(&buffer[..n]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Take the next line out of the input; at its end, what is left.
    fn next_line(&mut self) -> Option<Vec<u8>> {
        let end = self.input.iter().position(|byte| *byte == b'\n');
        match end {
            Some(end) => Some(self.input.drain(..=end).collect()),
            None if self.ended && !self.input.is_empty() => Some(std::mem::take(&mut self.input)),
            None => None,
        }
    }

    fn answer(&mut self, line: &[u8], handler: &mut Handler<'_>) {
        self.active = Instant::now();
        match Ask::parse(line) {
            Ok(ask) => {
                self.waits = true;
                handler(self.id, ask);
            }
            Err(error) => self.say(&json!({ "error": format!("bad request: {error}") })),
        }
    }

    fn say_answer(&mut self, answer: Answer) {
        match answer {
            Ok(answer) => self.say(&answer),
            Err(refusal) => self.say(&json!({ "error": refusal.text })),
        }
    }

    fn say(&mut self, answer: &Value) {
        self.output = answer.to_string().into_bytes();
        self.output.push(b'\n');
        // What cannot be sent now is sent when poll says so; a client that
        // is gone is found out then, too.
        let _ = self.send();
    }
}
