//! The fixed-newstyle handshake, which negotiates option by option which disk a client uses and how
//! (proto.md, "Handshake").
//!
//! The handshake runs on the connection's own thread, with blocking I/O and one deadline for all of
//! it. Input is not trusted: lengths are checked before memory is allocated, and a protocol
//! violation that no error reply can express ends the connection.

mod choose;
mod context;
mod option;
#[cfg(test)]
mod tests;

use super::connection::Agreed;
use super::export::{Export, Exports, InUse};
use super::moving::{Ask, Mover};
use super::tls::{Mode, Tls};
use context::Contexts;
use fathom_nbd::protocol::{
    INIT_MAGIC, OPTION_MAGIC, OptionHeader, Replies, handshake_flag, opt, rep,
};
use fathom_nbd::transport::Transport;
use fathom_units::cause;
use option::push_reply;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;

/// Longest data of an option that is parsed, in bytes: names and queries of 4 KiB each, and spare
/// room.
const MAX_DATA: u32 = 64 << 10;
/// Longest data of an option that is skipped, in bytes; a client that sends more is disconnected.
const MAX_SKIPPED: u32 = 32 << 20;
/// Maximum number of options in one handshake.
const MAX_OPTIONS: usize = 1000;

/// Interface of the server that a handshake needs.
pub trait Host {
    fn exports(&self) -> &Exports;

    /// Returns the TLS configuration; None if TLS is off.
    fn tls(&self) -> Option<&Tls>;

    /// Activates the disk for a connection that is about to be served.
    fn admit(&self, export: &Arc<Export>) -> Result<InUse, Denied>;
}

/// Why an existing export is unavailable; a sentence for the client.
#[derive(Debug, thiserror::Error)]
pub enum Denied {
    #[error("the server is stopping, or the disk was removed")]
    Stopping,
    #[error("{0}")]
    NotNow(String),
}

/// Successful end of a handshake.
pub enum Outcome {
    /// The connection can be served.
    Agreed(Agreement),
    /// The client has what it wanted, for example a list of exports.
    Over,
}

/// The negotiated connection.
pub struct Agreement {
    pub in_use: InUse,
    pub agreed: Agreed,
    /// Set if the server reports to the client which blocks change.
    pub mover: Option<Mover>,
    /// The export as it was described to the client.
    pub view: super::connection::ExportView,
}

/// Why a handshake has failed, in one line.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("the handshake took too long")]
    TimedOut,
    #[error("the client closed the connection during the handshake")]
    Vanished,
    #[error("{}", cause(.0))]
    Io(io::Error),
    #[error("{0}")]
    Refused(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            ErrorKind::TimedOut => Failure::TimedOut,
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                Failure::Vanished
            }
            _ => Failure::Io(error),
        }
    }
}

fn refused(problem: impl Into<String>) -> Failure {
    Failure::Refused(problem.into())
}

/// An error reply: its type, and a sentence for the client's user.
struct No(u32, String);

impl No {
    fn invalid(problem: impl Into<String>) -> No {
        No(rep::ERR_INVALID, problem.into())
    }
}

impl From<Denied> for No {
    fn from(denied: Denied) -> No {
        let kind = match denied {
            Denied::Stopping => rep::ERR_SHUTDOWN,
            Denied::NotNow(_) => rep::ERR_POLICY,
        };
        No(kind, denied.to_string())
    }
}

/// How the handshake continues after an option.
enum Next {
    Option,
    Agreed(Box<Agreement>),
    Over,
}

/// The handshake of one client.
pub struct Handshake<'a, H: Host> {
    host: &'a H,
    transport: Transport,
    /// The client's flags.
    fixed: bool,
    no_zeroes: bool,
    replies: Replies,
    /// The contexts that the client has selected, and their export.
    chosen: Option<(Arc<Export>, Contexts)>,
    /// The export whose changes the client has asked for instead.
    changes_of: Option<(Arc<Export>, Ask, String)>,
    /// Replies that are not sent yet.
    out: Vec<u8>,
}

impl<'a, H: Host> Handshake<'a, H> {
    pub fn new(host: &'a H, transport: Transport) -> Self {
        Handshake {
            host,
            transport,
            fixed: false,
            no_zeroes: false,
            replies: Replies::Simple,
            chosen: None,
            changes_of: None,
            out: Vec::new(),
        }
    }

    /// Sends the greeting and answers options until one ends the handshake. Closes the transport
    /// unless the client and the server agreed.
    pub fn run(mut self) -> (Result<Outcome, Failure>, Transport) {
        let outcome = self.converse();
        if !matches!(outcome, Ok(Outcome::Agreed(_))) {
            self.transport.close();
        }
        (outcome, self.transport)
    }

    fn converse(&mut self) -> Result<Outcome, Failure> {
        if !self.greet()? {
            return Ok(Outcome::Over);
        }
        for _ in 0..MAX_OPTIONS {
            let Some(header) = self.next_option()? else {
                return Ok(Outcome::Over);
            };
            let next = self.answer(header)?;
            self.send()?;
            match next {
                Next::Option => {}
                Next::Agreed(agreement) => return Ok(Outcome::Agreed(*agreement)),
                Next::Over => return Ok(Outcome::Over),
            }
        }
        Err(refused(format!("more than {MAX_OPTIONS} options")))
    }

    /// Sends the greeting and reads the client's flags. Returns false if the client closed the
    /// connection without a byte, as a port check does.
    fn greet(&mut self) -> Result<bool, Failure> {
        self.out.extend_from_slice(&INIT_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        let offered = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        self.out.extend_from_slice(&offered.to_be_bytes());
        self.send()?;
        let mut flags = [0; 4];
        if !self.read_or_end(&mut flags)? {
            return Ok(false);
        }
        let flags = u32::from_be_bytes(flags);
        let unknown = flags & !u32::from(offered);
        if unknown != 0 {
            return Err(refused(format!("unknown client flags {unknown:#x}")));
        }
        self.fixed = flags & u32::from(handshake_flag::FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
        Ok(true)
    }

    /// Reads the next option. Returns None if the client closed the connection between options.
    fn next_option(&mut self) -> Result<Option<OptionHeader>, Failure> {
        let mut bytes = [0; OptionHeader::LEN];
        if !self.read_or_end(&mut bytes)? {
            return Ok(None);
        }
        let header = OptionHeader::parse(&bytes).ok_or_else(|| refused("this is no NBD option"))?;
        if header.len > MAX_SKIPPED {
            let OptionHeader { option, len } = header;
            return Err(refused(format!("option {option} with {len} bytes of data")));
        }
        Ok(Some(header))
    }

    /// Fills `bytes`. Returns false if the connection ended before the first byte.
    fn read_or_end(&mut self, bytes: &mut [u8]) -> Result<bool, Failure> {
        let n = loop {
            match self.transport.read(bytes) {
                Ok(n) => break n,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Some clients close the socket without a TLS close_notify.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => break 0,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break 0,
                Err(error) => return Err(error.into()),
            }
        };
        if n == 0 {
            return Ok(false);
        }
        self.transport.read_exact(&mut bytes[n..])?;
        Ok(true)
    }

    fn send(&mut self) -> Result<(), Failure> {
        self.transport.write_all(&self.out)?;
        self.transport.flush()?;
        self.out.clear();
        Ok(())
    }

    fn answer(&mut self, header: OptionHeader) -> Result<Next, Failure> {
        let OptionHeader { option, len } = header;
        if option == opt::EXPORT_NAME {
            return self.export_name(len);
        }
        if !self.fixed {
            // proto.md, "Newstyle negotiation": without fixed newstyle, there is no error reply.
            return Err(refused(format!(
                "option {option} without fixed newstyle negotiation"
            )));
        }
        let data = self.read_data(len)?;
        if option == opt::ABORT {
            self.reply(option, rep::ACK, &[]);
            // proto.md, NBD_OPT_ABORT: the client need not wait for the reply.
            let _ = self.send();
            self.out.clear();
            return Ok(Next::Over);
        }
        let answer = match data {
            Some(data) => self.answer_with(option, &data),
            None => Err(Stop::No(No(
                rep::ERR_TOO_BIG,
                format!("more than {MAX_DATA} bytes of data"),
            ))),
        };
        match answer {
            Ok(next) => Ok(next),
            Err(Stop::No(No(kind, text))) => {
                tracing::debug!("nbd: option {option} refused: {text}");
                self.reply(option, kind, &[text.as_bytes()]);
                Ok(Next::Option)
            }
            Err(Stop::Failure(failure)) => Err(failure),
        }
    }

    /// Reads an option's data. Returns None, with the data skipped, if it is too long.
    fn read_data(&mut self, len: u32) -> Result<Option<Vec<u8>>, Failure> {
        if len > MAX_DATA {
            option::skip(&mut self.transport, len.into())?;
            return Ok(None);
        }
        let mut data = vec![0; len as usize];
        self.transport.read_exact(&mut data)?;
        Ok(Some(data))
    }

    fn answer_with(&mut self, option: u32, data: &[u8]) -> Result<Next, Stop> {
        if option == opt::STARTTLS {
            return self.start_tls(data);
        }
        if self.lacks_tls() {
            // proto.md, "FORCEDTLS mode": this applies even to unknown options.
            let why = "this server wants TLS first";
            return Err(No(rep::ERR_TLS_REQD, why.into()).into());
        }
        match option {
            opt::LIST => self.list(data)?,
            opt::INFO | opt::GO => return Ok(self.choose(option, data)?),
            opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS => self.widen(option, data)?,
            opt::LIST_META_CONTEXT => self.list_contexts(data)?,
            opt::SET_META_CONTEXT => self.set_contexts(data)?,
            _ => return Err(No(rep::ERR_UNSUP, format!("option {option} is unknown")).into()),
        }
        self.reply(option, rep::ACK, &[]);
        Ok(Next::Option)
    }

    fn lacks_tls(&self) -> bool {
        let required = self
            .host
            .tls()
            .is_some_and(|tls| tls.mode() == Mode::Require);
        required && !self.transport.is_encrypted()
    }

    fn start_tls(&mut self, data: &[u8]) -> Result<Next, Stop> {
        no_data(data)?;
        if self.transport.is_encrypted() {
            return Err(No::invalid("TLS is on already").into());
        }
        let Some(tls) = self.host.tls() else {
            return Err(No(rep::ERR_POLICY, "this server has no TLS".into()).into());
        };
        let session = tls.session().map_err(|error| refused(error.to_string()))?;
        self.reply(opt::STARTTLS, rep::ACK, &[]);
        self.send()?;
        self.transport.encrypt(session).map_err(tls_failure)?;
        // proto.md, NBD_OPT_STARTTLS: everything negotiated before TLS is discarded, since a man in
        // the middle may have tampered with it.
        self.replies = Replies::Simple;
        self.chosen = None;
        self.changes_of = None;
        Ok(Next::Option)
    }

    fn list(&mut self, data: &[u8]) -> Result<(), No> {
        no_data(data)?;
        for export in self.host.exports().all() {
            let name = export.name().as_bytes();
            let len = (name.len() as u32).to_be_bytes();
            let parts = [&len[..], name, export.description().as_bytes()];
            push_reply(&mut self.out, opt::LIST, rep::SERVER, &parts);
        }
        Ok(())
    }

    /// Enables structured replies, or extended headers, which include them.
    fn widen(&mut self, option: u32, data: &[u8]) -> Result<(), No> {
        no_data(data)?;
        match (option, self.replies) {
            (opt::STRUCTURED_REPLY, Replies::Extended) => Err(No(
                rep::ERR_EXT_HEADER_REQD,
                "extended headers are agreed upon already".into(),
            )),
            (opt::STRUCTURED_REPLY, Replies::Structured)
            | (opt::EXTENDED_HEADERS, Replies::Extended) => {
                Err(No::invalid("that is agreed upon already"))
            }
            (opt::STRUCTURED_REPLY, _) => {
                self.replies = Replies::Structured;
                Ok(())
            }
            _ => {
                self.replies = Replies::Extended;
                Ok(())
            }
        }
    }

    fn reply(&mut self, option: u32, kind: u32, parts: &[&[u8]]) {
        push_reply(&mut self.out, option, kind, parts);
    }
}

/// Why an option failed.
enum Stop {
    /// The client gets an error reply and may continue.
    No(No),
    Failure(Failure),
}

impl From<No> for Stop {
    fn from(no: No) -> Stop {
        Stop::No(no)
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Failure(failure)
    }
}

fn no_data(data: &[u8]) -> Result<(), No> {
    match data.is_empty() {
        true => Ok(()),
        false => Err(No::invalid("this option has no data")),
    }
}

fn tls_failure(error: io::Error) -> Failure {
    match error.kind() {
        ErrorKind::TimedOut => Failure::TimedOut,
        _ => refused(format!("TLS: {error}")),
    }
}
