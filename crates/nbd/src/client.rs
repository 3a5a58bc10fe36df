//! The client's side of the fixed newstyle handshake, up to the first request.
//!
//! All calls block; the stream is responsible for a deadline. All data from the server is limited
//! in length and checked.

#[cfg(feature = "testing")]
pub mod fuzz;

use crate::protocol::{
    BASE_ALLOCATION, BlockSizes, DIRTY_BITMAP, ExportInfo, INIT_MAGIC, Info, MAX_PAYLOAD,
    MAX_STRING, OLDSTYLE_MAGIC, OPTION_MAGIC, OptionHeader, OptionReplyHeader, Replies,
    export_flag, handshake_flag, info, opt, readable, rep, u32_at,
};
use crate::transport::Transport;
use fathom_units::cause;
use rustls::ClientConnection;
use std::io::{self, Read, Write};

/// Maximum length in bytes of a reply to an option.
///
/// Servers need less, because names and error texts have at most 4096 bytes.
const MAX_ANSWER: u32 = 16 << 10;

/// Maximum number of replies to one option.
///
/// A server needs only a few. Without this limit, only the deadline would stop a server that sends
/// replies for ever.
const MAX_ANSWERS: usize = 64;

/// The requests of a client in the handshake.
#[derive(Clone, Copy, Debug)]
pub struct Wishes<'a> {
    /// The export's name; an empty name is the server's default export.
    pub export: &'a str,
    /// Forms of replies, the preferred first. The connection uses simple replies if the server
    /// supports none of them.
    pub replies: &'a [Replies],
    /// A metadata context, which is not used with simple replies.
    ///
    /// A server without base:allocation is accepted. A server without another requested context is
    /// an error.
    pub context: Option<&'a str>,
}

/// An export, as its server describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Size in bytes; at most `i64::MAX`.
    pub size: u64,
    /// See [`export_flag`].
    pub flags: u16,
    /// Unit of offsets and lengths in bytes: a power of two, at most 64 KiB.
    pub minimum_block: u32,
    /// Preferred unit of offsets and lengths in bytes.
    pub preferred_block: u32,
    /// Maximum length in bytes of a read or write that the server accepts.
    ///
    /// The value is at least `minimum_block` and at least 512. The default is 32 MiB, if the server
    /// does not send a value.
    pub maximum_block: u32,
    /// The negotiated form of replies.
    pub replies: Replies,
    /// The id of the requested metadata context, if the server supports the context.
    pub context: Option<u32>,
}

impl Export {
    /// Returns whether the export has this transmission flag.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Returns whether the server accepts several connections at once, which all see the same data.
    pub fn can_multi_conn(&self) -> bool {
        self.has(export_flag::CAN_MULTI_CONN)
    }

    /// Returns whether completed writes may not be durable before a flush.
    pub fn has_cache(&self) -> bool {
        self.has(export_flag::SEND_FLUSH)
    }

    /// Returns whether the server forbids writes.
    pub fn is_read_only(&self) -> bool {
        self.has(export_flag::READ_ONLY)
    }

    /// Returns the maximum length in bytes of a read or write of whole blocks.
    ///
    /// The length is a multiple of `minimum_block` and of 512, and at most 32 MiB.
    pub fn maximum_payload(&self) -> u32 {
        let unit = self.minimum_block.max(512);
        self.maximum_block.min(MAX_PAYLOAD) / unit * unit
    }
}

/// Why the handshake failed; one line for the user.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

type Result<T> = std::result::Result<T, Refusal>;

/// Does the handshake on an open connection, up to the transmission phase.
pub fn handshake(stream: &mut (impl Read + Write), wishes: &Wishes<'_>) -> Result<Export> {
    let flags = greet(stream)?;
    agree(stream, flags, wishes)
}

/// Does the handshake like [`handshake`], but with TLS. Fails if the server does not support TLS.
pub fn handshake_by_tls(
    transport: &mut Transport,
    session: ClientConnection,
    wishes: &Wishes<'_>,
) -> Result<Export> {
    let flags = greet(transport)?;
    send_option(transport, opt::STARTTLS, &[])?;
    let answer = Answer::read(transport, opt::STARTTLS)?;
    match answer.kind {
        rep::ACK if answer.data.is_empty() => {}
        kind if kind & rep::ERROR_BIT != 0 => {
            return Err(broken(
                "does not support TLS; write nbd instead of nbds to connect without it",
            ));
        }
        _ => return Err(answer.unexpected()),
    }
    let encrypted = transport.encrypt(session);
    encrypted.map_err(|error| match error.get_ref() {
        Some(inner) if inner.is::<rustls::Error>() => Refusal(format!("TLS: {}", cause(inner))),
        _ => lost(error),
    })?;
    agree(transport, flags, wishes)
}

fn agree(stream: &mut (impl Read + Write), flags: u16, wishes: &Wishes<'_>) -> Result<Export> {
    let name = wishes.export;
    let replies = choose_replies(stream, wishes.replies)?;
    let context = match wishes.context {
        Some(context) if replies != Replies::Simple => choose_context(stream, name, context)?,
        Some(BASE_ALLOCATION) | None => None,
        Some(_) => return Err(broken("does not support structured replies")),
    };
    let export = match go(stream, name)? {
        Some(export) => export,
        // A server without NBD_OPT_GO may support NBD_OPT_EXPORT_NAME, which GO replaced.
        None if replies == Replies::Simple => export_name(stream, name, flags)?,
        None => return Err(broken("supports structured replies, but not NBD_OPT_GO")),
    };
    Ok(Export {
        replies,
        context,
        ..export
    })
}

fn greet(stream: &mut (impl Read + Write)) -> Result<u16> {
    if read_u64(stream)? != INIT_MAGIC {
        return Err(broken("is not an NBD server"));
    }
    match read_u64(stream)? {
        OPTION_MAGIC => {}
        OLDSTYLE_MAGIC => return Err(broken("supports only the oldstyle handshake")),
        _ => return Err(broken("is not an NBD server")),
    }
    let flags = u16::from_be_bytes(read(stream)?);
    if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
        return Err(broken("does not support the fixed newstyle handshake"));
    }
    let ours = flags & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
    write(stream, &u32::from(ours).to_be_bytes())?;
    Ok(flags)
}

fn choose_replies(stream: &mut (impl Read + Write), wanted: &[Replies]) -> Result<Replies> {
    for &replies in wanted {
        let option = match replies {
            Replies::Extended => opt::EXTENDED_HEADERS,
            Replies::Structured => opt::STRUCTURED_REPLY,
            Replies::Simple => break,
        };
        send_option(stream, option, &[])?;
        let answer = Answer::read(stream, option)?;
        match answer.kind {
            rep::ACK => return Ok(replies),
            // The server rejects all other options without TLS.
            rep::ERR_TLS_REQD => return Err(answer.refusal("")),
            kind if kind & rep::ERROR_BIT != 0 => {}
            _ => return Err(answer.unexpected()),
        }
    }
    Ok(Replies::Simple)
}

/// Negotiates a metadata context and returns its id. Returns `None` if the server does not support
/// base:allocation.
fn choose_context(
    stream: &mut (impl Read + Write),
    name: &str,
    context: &str,
) -> Result<Option<u32>> {
    let mut data = Vec::new();
    put_string(&mut data, name.as_bytes());
    data.extend_from_slice(&1u32.to_be_bytes());
    put_string(&mut data, context.as_bytes());
    send_option(stream, opt::SET_META_CONTEXT, &data)?;
    let mut id = None;
    for _ in 0..MAX_ANSWERS {
        let answer = Answer::read(stream, opt::SET_META_CONTEXT)?;
        match answer.kind {
            rep::ACK if id.is_some() || context == BASE_ALLOCATION => return Ok(id),
            rep::ACK => return Err(missing(name, context)),
            rep::META_CONTEXT if answer.data.get(4..) == Some(context.as_bytes()) => {
                id = Some(u32_at(&answer.data, 0));
            }
            // The reason is in the server's reply to NBD_OPT_GO.
            kind if kind & rep::ERROR_BIT != 0 && context == BASE_ALLOCATION => return Ok(None),
            rep::ERR_UNSUP => return Err(missing(name, context)),
            kind if kind & rep::ERROR_BIT != 0 => return Err(answer.refusal(name)),
            _ => return Err(answer.unexpected()),
        }
    }
    Err(broken("repeats the reply to an option"))
}

/// Returns the error for a context that the server does not support.
fn missing(name: &str, context: &str) -> Refusal {
    broken(&match context.strip_prefix(DIRTY_BITMAP) {
        Some(bitmap) => format!("has no dirty bitmap '{bitmap}' of export '{name}'"),
        None => format!("does not allow export '{name}' to be taken over"),
    })
}

/// Requests the export by NBD_OPT_GO. Returns `None` if the server does not support the option.
fn go(stream: &mut (impl Read + Write), name: &str) -> Result<Option<Export>> {
    let mut data = Vec::new();
    put_string(&mut data, name.as_bytes());
    data.extend_from_slice(&1u16.to_be_bytes());
    data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    send_option(stream, opt::GO, &data)?;
    let (mut found, mut blocks) = (None, None);
    for _ in 0..MAX_ANSWERS {
        let answer = Answer::read(stream, opt::GO)?;
        match answer.kind {
            rep::ACK => {
                let found = found.ok_or_else(|| broken("did not send the export's size"))?;
                return export(found, blocks).map(Some);
            }
            rep::ERR_UNSUP => return Ok(None),
            rep::INFO => {}
            _ => return Err(answer.refusal(name)),
        }
        match Info::parse(&answer.data) {
            Some(Info::Export(export)) => found = Some(export),
            Some(Info::BlockSizes(sizes)) => blocks = Some(sizes),
            Some(Info::Other) => {}
            None => return Err(broken("sent an NBD_REP_INFO of a wrong length")),
        }
    }
    Err(broken("repeats the reply to an option"))
}

fn export_name(stream: &mut (impl Read + Write), name: &str, greeted: u16) -> Result<Export> {
    send_option(stream, opt::EXPORT_NAME, name.as_bytes())?;
    let size = read_u64(stream)?;
    let flags = u16::from_be_bytes(read(stream)?);
    if greeted & handshake_flag::NO_ZEROES == 0 {
        read::<124>(stream)?;
    }
    export(ExportInfo { size, flags }, None)
}

/// Checks the server's description of the export.
fn export(export: ExportInfo, blocks: Option<BlockSizes>) -> Result<Export> {
    if export.size > i64::MAX as u64 {
        return Err(broken("has an export of an impossible size"));
    }
    let BlockSizes {
        minimum,
        preferred,
        maximum,
    } = blocks.unwrap_or(BlockSizes {
        minimum: 1,
        preferred: 4096,
        maximum: MAX_PAYLOAD,
    });
    let unit = minimum.max(512);
    if !minimum.is_power_of_two() || minimum > 64 << 10 || maximum < unit {
        return Err(broken(&format!(
            "has impossible block sizes: {minimum} to {maximum} bytes"
        )));
    }
    // The preferred size is only a hint, and some servers send one below the minimum.
    let preferred = match preferred.is_power_of_two() {
        true => preferred.clamp(unit, 32 << 20),
        false => unit.max(4096),
    };
    Ok(Export {
        size: export.size,
        flags: export.flags,
        minimum_block: minimum,
        preferred_block: preferred,
        maximum_block: maximum,
        replies: Replies::Simple,
        context: None,
    })
}

/// A reply to an option.
struct Answer {
    option: u32,
    kind: u32,
    data: Vec<u8>,
}

impl Answer {
    fn read(stream: &mut impl Read, option: u32) -> Result<Answer> {
        let Some(header) = OptionReplyHeader::parse(&read(stream)?) else {
            return Err(broken(
                "sent a reply to an option with a wrong magic number",
            ));
        };
        let OptionReplyHeader { kind, len, .. } = header;
        if header.option != option {
            return Err(broken("sent a reply to an option that was not sent"));
        }
        if len > MAX_ANSWER {
            return Err(broken(&format!("sent a reply of {len} bytes to an option")));
        }
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data).map_err(lost)?;
        Ok(Answer { option, kind, data })
    }

    fn unexpected(&self) -> Refusal {
        let (option, kind) = (self.option, self.kind);
        broken(&format!("replied {kind:#x} to option {option}"))
    }

    fn refusal(&self, name: &str) -> Refusal {
        let why = match self.kind {
            rep::ERR_UNKNOWN => format!("has no export '{name}'"),
            rep::ERR_TLS_REQD => "requires TLS; write nbds instead of nbd".into(),
            rep::ERR_POLICY => format!("does not allow export '{name}'"),
            kind if kind & rep::ERROR_BIT != 0 => format!("refuses export '{name}' ({kind:#x})"),
            _ => return self.unexpected(),
        };
        let text = &self.data[..self.data.len().min(MAX_STRING)];
        match readable(text) {
            text if text.is_empty() => broken(&why),
            text => broken(&format!("{why}: {text}")),
        }
    }
}

fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    out.extend_from_slice(&(text.len() as u32).to_be_bytes());
    out.extend_from_slice(text);
}

fn send_option(stream: &mut impl Write, option: u32, data: &[u8]) -> Result<()> {
    let len = data.len() as u32;
    let header = OptionHeader { option, len }.to_bytes();
    write(stream, &[&header[..], data].concat())
}

fn write(stream: &mut impl Write, bytes: &[u8]) -> Result<()> {
    stream.write_all(bytes).map_err(lost)
}

fn read<const N: usize>(stream: &mut impl Read) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map_err(lost)?;
    Ok(bytes)
}

fn read_u64(stream: &mut impl Read) -> Result<u64> {
    Ok(u64::from_be_bytes(read(stream)?))
}

fn broken(what: &str) -> Refusal {
    Refusal(format!("the server {what}"))
}

fn lost(error: io::Error) -> Refusal {
    match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe => broken("closed the connection in the handshake"),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            broken("did not respond in time; it may have reached its limit of connections")
        }
        _ => Refusal(format!("the handshake failed: {}", cause(error))),
    }
}
