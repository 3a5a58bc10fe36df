//! The fixed newstyle handshake, up to the first request.

use std::fs::File;
use std::io::{self, Read, Write};

use crate::error::{Error, Result};
use crate::nbd::wire::{self, Replies};

/// More than a server has reason to answer to an option: names and error
/// texts have 4096 bytes at most.
const MAX_ANSWER: u32 = 16 << 10;
/// What may be read when the server says nothing of block sizes.
const DEFAULT_MAX_LEN: u32 = 32 << 20;

/// The export, as the server describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Bytes that offsets and lengths must be multiples of.
    pub min_block: u32,
    /// The longest read or write.
    pub max_len: u32,
    pub replies: Replies,
}

/// Goes from an open connection to the transmission phase, with the best form
/// of replies that the server has, or with `wanted` and none else.
pub fn handshake(stream: &mut File, name: &str, wanted: Option<Replies>) -> Result<Export> {
    let newstyle_flags = greet(stream)?;
    let replies = choose_replies(stream, wanted)?;
    match go(stream, name, replies)? {
        Some(export) => Ok(export),
        // A server that has no GO may yet have the option that GO replaced.
        None if replies == Replies::Simple => export_name(stream, name, newstyle_flags),
        None => Err(broken(
            "the server has structured replies but not NBD_OPT_GO",
        )),
    }
}

fn greet(stream: &mut File) -> Result<u16> {
    if read_u64(stream)? != wire::INIT_MAGIC {
        return Err(broken("this is no NBD server"));
    }
    match read_u64(stream)? {
        wire::OPTION_MAGIC => {}
        wire::OLDSTYLE_MAGIC => return Err(broken("the server has only the oldstyle handshake")),
        _ => return Err(broken("this is no NBD server")),
    }
    let flags = u16::from_be_bytes(read(stream)?);
    if flags & wire::FIXED_NEWSTYLE == 0 {
        return Err(broken("the server has not the fixed newstyle handshake"));
    }
    let ours = flags & (wire::FIXED_NEWSTYLE | wire::NO_ZEROES);
    write(stream, &u32::from(ours).to_be_bytes())?;
    Ok(flags)
}

fn choose_replies(stream: &mut File, wanted: Option<Replies>) -> Result<Replies> {
    let options = [
        (Replies::Extended, wire::OPT_EXTENDED_HEADERS),
        (Replies::Structured, wire::OPT_STRUCTURED_REPLY),
    ];
    for (replies, option) in options {
        if wanted.is_some_and(|w| w != replies) {
            continue;
        }
        send_option(stream, option, &[])?;
        let answer = Answer::read(stream, option)?;
        match answer.kind {
            wire::REP_ACK => return Ok(replies),
            kind if kind & wire::REP_ERROR == 0 => return Err(answer.unexpected()),
            _ if wanted.is_some() => {
                return Err(Error::Refused {
                    feature: replies.name(),
                    hint: "leave --replies out",
                });
            }
            _ => {}
        }
    }
    Ok(Replies::Simple)
}

/// None: the server does not know the option.
fn go(stream: &mut File, name: &str, replies: Replies) -> Result<Option<Export>> {
    let mut data = Vec::with_capacity(name.len() + 8);
    data.extend_from_slice(&(name.len() as u32).to_be_bytes());
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(&1u16.to_be_bytes());
    data.extend_from_slice(&wire::INFO_BLOCK_SIZE.to_be_bytes());
    send_option(stream, wire::OPT_GO, &data)?;
    let mut found = None;
    let (mut min_block, mut max_len) = (1, DEFAULT_MAX_LEN);
    loop {
        let answer = Answer::read(stream, wire::OPT_GO)?;
        match answer.kind {
            wire::REP_ACK => break,
            wire::REP_ERR_UNSUP => return Ok(None),
            wire::REP_INFO => {}
            _ => return Err(answer.refusal(name)),
        }
        let data = &answer.data[..];
        match wire::u16_at(data, 0) {
            Some(wire::INFO_EXPORT) if data.len() == 12 => {
                found = wire::u64_at(data, 2).zip(wire::u16_at(data, 10));
            }
            Some(wire::INFO_BLOCK_SIZE) if data.len() == 14 => {
                min_block = wire::u32_at(data, 2).unwrap_or(1);
                max_len = wire::u32_at(data, 10).unwrap_or(DEFAULT_MAX_LEN);
            }
            Some(wire::INFO_EXPORT | wire::INFO_BLOCK_SIZE) | None => {
                return Err(broken("an NBD_REP_INFO of a wrong length"));
            }
            Some(_) => {}
        }
    }
    let (size, flags) = found.ok_or_else(|| broken("the server did not tell the export's size"))?;
    Ok(Some(Export {
        size,
        flags,
        min_block,
        max_len,
        replies,
    }))
}

fn export_name(stream: &mut File, name: &str, newstyle_flags: u16) -> Result<Export> {
    send_option(stream, wire::OPT_EXPORT_NAME, name.as_bytes())?;
    let size = read_u64(stream)?;
    let flags = u16::from_be_bytes(read(stream)?);
    if newstyle_flags & wire::NO_ZEROES == 0 {
        read::<124>(stream)?;
    }
    Ok(Export {
        size,
        flags,
        min_block: 1,
        max_len: DEFAULT_MAX_LEN,
        replies: Replies::Simple,
    })
}

/// One reply to an option.
struct Answer {
    option: u32,
    kind: u32,
    data: Vec<u8>,
}

impl Answer {
    fn read(stream: &mut File, option: u32) -> Result<Answer> {
        if read_u64(stream)? != wire::OPTION_REPLY_MAGIC {
            return Err(broken("a reply to an option has a wrong magic number"));
        }
        if u32::from_be_bytes(read(stream)?) != option {
            return Err(broken("a reply to an option that was not sent"));
        }
        let kind = u32::from_be_bytes(read(stream)?);
        let len = u32::from_be_bytes(read(stream)?);
        if len > MAX_ANSWER {
            return Err(broken(&format!("a reply of {len} bytes to an option")));
        }
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data).map_err(lost)?;
        Ok(Answer { option, kind, data })
    }

    fn unexpected(&self) -> Error {
        let (option, kind) = (self.option, self.kind);
        broken(&format!("option {option} was answered by {kind:#x}"))
    }

    fn refusal(&self, name: &str) -> Error {
        let text = String::from_utf8_lossy(&self.data);
        let text: String = text.chars().filter(|c| !c.is_control()).collect();
        let why = match self.kind {
            wire::REP_ERR_UNKNOWN => format!("has no export '{name}'"),
            wire::REP_ERR_TLS_REQD => "requires TLS, which is not supported here".into(),
            wire::REP_ERR_POLICY => format!("does not allow export '{name}'"),
            kind if kind & wire::REP_ERROR != 0 => format!("refuses export '{name}' ({kind:#x})"),
            _ => return self.unexpected(),
        };
        match text.is_empty() {
            true => Error::Handshake(format!("the server {why}")),
            false => Error::Handshake(format!("the server {why}: {text}")),
        }
    }
}

fn send_option(stream: &mut File, option: u32, data: &[u8]) -> Result<()> {
    let mut out = Vec::with_capacity(16 + data.len());
    out.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
    write(stream, &out)
}

fn write(stream: &mut File, bytes: &[u8]) -> Result<()> {
    stream.write_all(bytes).map_err(lost)
}

fn read<const N: usize>(stream: &mut File) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map_err(lost)?;
    Ok(bytes)
}

fn read_u64(stream: &mut File) -> Result<u64> {
    Ok(u64::from_be_bytes(read(stream)?))
}

fn broken(what: &str) -> Error {
    Error::Handshake(what.into())
}

fn lost(e: io::Error) -> Error {
    Error::Handshake(match e.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe => "the server closed the connection".into(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "the server did not answer; it may not allow one more connection".into()
        }
        _ => e.to_string(),
    })
}
