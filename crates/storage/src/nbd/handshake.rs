//! The fixed newstyle handshake, up to the first request: blocking, by one
//! deadline.

use super::wire::{self, answer, export_flag, greeting, info, option};
use std::io::{self, Read, Write};

/// More than a server has reason to answer to an option: names and error
/// texts have 4096 bytes at most.
const MAX_ANSWER: u32 = 16 << 10;

/// Answers to one option. A server has a few to give; one that never stops
/// would meet the deadline only.
const MAX_ANSWERS: usize = 64;

/// The most in one read or write, and in any case if the server says nothing
/// of block sizes (NBD, "Size constraints").
pub(super) const MAX_PAYLOAD: u32 = 32 << 20;

/// The name of the metadata context that tells holes from data.
const ALLOCATION: &[u8] = b"base:allocation";

/// An export, as its server describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Bytes, as the server has it: any number.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
    /// What offsets and lengths are to be multiples of (bytes): a power of
    /// two of 64 KiB at most.
    pub minimum_block: u32,
    /// What they had better be multiples of.
    pub preferred_block: u32,
    /// The longest read or write: a multiple of `minimum_block`, and 32 MiB
    /// at most.
    pub maximum_payload: u32,
    /// Replies come in chunks.
    pub structured: bool,
    /// The id of base:allocation, if the server tells which parts hold data.
    pub allocation: Option<u32>,
}

impl Export {
    pub(super) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// The server takes several connections at once, which all see the same.
    pub fn can_multi_conn(&self) -> bool {
        self.has(export_flag::CAN_MULTI_CONN)
    }

    /// The server does not allow writing.
    pub fn is_read_only(&self) -> bool {
        self.has(export_flag::READ_ONLY)
    }
}

/// Why there is no export; one line for the user, without the server's name.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) String);

type Result<T> = std::result::Result<T, Refusal>;

/// From an open connection to the transmission phase, with the export of this
/// name.
pub(super) fn handshake(stream: &mut (impl Read + Write), name: &str) -> Result<Export> {
    let flags = greet(stream)?;
    let structured = choose_structured(stream)?;
    let allocation = match structured {
        true => choose_allocation(stream, name)?,
        false => None,
    };
    let export = match go(stream, name)? {
        Some(export) => export,
        // A server that has no GO may yet have the option that GO replaced.
        None if !structured => export_name(stream, name, flags)?,
        None => return Err(broken("has structured replies, but not NBD_OPT_GO")),
    };
    Ok(Export {
        structured,
        allocation,
        ..export
    })
}

fn greet(stream: &mut (impl Read + Write)) -> Result<u16> {
    if read_u64(stream)? != wire::INIT_MAGIC {
        return Err(broken("is no NBD server"));
    }
    match read_u64(stream)? {
        wire::OPTION_MAGIC => {}
        wire::OLDSTYLE_MAGIC => return Err(broken("has only the oldstyle handshake")),
        _ => return Err(broken("is no NBD server")),
    }
    let flags = u16::from_be_bytes(read(stream)?);
    if flags & greeting::FIXED_NEWSTYLE == 0 {
        return Err(broken("has not the fixed newstyle handshake"));
    }
    let ours = flags & (greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES);
    write(stream, &u32::from(ours).to_be_bytes())?;
    Ok(flags)
}

fn choose_structured(stream: &mut (impl Read + Write)) -> Result<bool> {
    send_option(stream, option::STRUCTURED_REPLY, &[])?;
    let answer = Answer::read(stream, option::STRUCTURED_REPLY)?;
    match answer.kind {
        answer::ACK => Ok(true),
        // Nothing else is offered without TLS.
        answer::ERR_TLS_REQD => Err(answer.refusal("")),
        kind if kind & answer::ERROR != 0 => Ok(false),
        _ => Err(answer.unexpected()),
    }
}

/// The id of base:allocation; None if the server has it not.
fn choose_allocation(stream: &mut (impl Read + Write), name: &str) -> Result<Option<u32>> {
    let mut data = Vec::new();
    put_string(&mut data, name.as_bytes());
    data.extend_from_slice(&1u32.to_be_bytes());
    put_string(&mut data, ALLOCATION);
    send_option(stream, option::SET_META_CONTEXT, &data)?;
    let mut id = None;
    for _ in 0..MAX_ANSWERS {
        let answer = Answer::read(stream, option::SET_META_CONTEXT)?;
        match answer.kind {
            answer::ACK => return Ok(id),
            answer::META_CONTEXT if answer.data.get(4..) == Some(ALLOCATION) => {
                id = Some(wire::u32_at(&answer.data, 0));
            }
            // Why, it says when the export is asked for.
            kind if kind & answer::ERROR != 0 => return Ok(None),
            _ => return Err(answer.unexpected()),
        }
    }
    Err(broken("answers one option again and again"))
}

/// None: the server does not know the option.
fn go(stream: &mut (impl Read + Write), name: &str) -> Result<Option<Export>> {
    let mut data = Vec::new();
    put_string(&mut data, name.as_bytes());
    data.extend_from_slice(&1u16.to_be_bytes());
    data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    send_option(stream, option::GO, &data)?;
    let (mut found, mut blocks) = (None, None);
    for _ in 0..MAX_ANSWERS {
        let answer = Answer::read(stream, option::GO)?;
        match answer.kind {
            answer::ACK => {
                let (size, flags) =
                    found.ok_or_else(|| broken("did not tell the export's size"))?;
                return export(size, flags, blocks).map(Some);
            }
            answer::ERR_UNSUP => return Ok(None),
            answer::INFO => {}
            _ => return Err(answer.refusal(name)),
        }
        let data = &answer.data[..];
        let kind = (data.len() >= 2).then(|| wire::u16_at(data, 0));
        match (kind, data.len()) {
            (Some(info::EXPORT), 12) => {
                found = Some((wire::u64_at(data, 2), wire::u16_at(data, 10)));
            }
            (Some(info::BLOCK_SIZE), 14) => {
                blocks = Some([2, 6, 10].map(|at| wire::u32_at(data, at)));
            }
            (Some(info::EXPORT | info::BLOCK_SIZE) | None, _) => {
                return Err(broken("sent an NBD_REP_INFO of a wrong length"));
            }
            _ => {}
        }
    }
    Err(broken("answers one option again and again"))
}

fn export_name(stream: &mut (impl Read + Write), name: &str, greeted: u16) -> Result<Export> {
    send_option(stream, option::EXPORT_NAME, name.as_bytes())?;
    let size = read_u64(stream)?;
    let flags = u16::from_be_bytes(read(stream)?);
    if greeted & greeting::NO_ZEROES == 0 {
        read::<124>(stream)?;
    }
    export(size, flags, None)
}

/// Checks what the server says of its export.
fn export(size: u64, flags: u16, blocks: Option<[u32; 3]>) -> Result<Export> {
    if size > i64::MAX as u64 {
        return Err(broken("has an export of an impossible size"));
    }
    let [minimum, preferred, maximum] = blocks.unwrap_or([1, 4096, MAX_PAYLOAD]);
    let unit = minimum.max(512);
    let maximum_payload = maximum.min(MAX_PAYLOAD) / unit.max(1) * unit;
    if !minimum.is_power_of_two() || minimum > 64 << 10 || maximum_payload == 0 {
        return Err(broken(&format!(
            "has impossible block sizes: {minimum} to {maximum} bytes"
        )));
    }
    // Only a wish, which some servers have below the minimum.
    let preferred = if preferred.is_power_of_two() {
        preferred
    } else {
        4096
    };
    let preferred = preferred.clamp(unit, 32 << 20);
    Ok(Export {
        size,
        flags,
        minimum_block: minimum,
        preferred_block: preferred,
        maximum_payload,
        structured: false,
        allocation: None,
    })
}

/// One reply to an option.
struct Answer {
    option: u32,
    kind: u32,
    data: Vec<u8>,
}

impl Answer {
    fn read(stream: &mut impl Read, option: u32) -> Result<Answer> {
        if read_u64(stream)? != wire::OPTION_REPLY_MAGIC {
            return Err(broken(
                "sent a reply to an option with a wrong magic number",
            ));
        }
        if u32::from_be_bytes(read(stream)?) != option {
            return Err(broken("sent a reply to an option that was not sent"));
        }
        let kind = u32::from_be_bytes(read(stream)?);
        let len = u32::from_be_bytes(read(stream)?);
        if len > MAX_ANSWER {
            return Err(broken(&format!("sent a reply of {len} bytes to an option")));
        }
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data).map_err(lost)?;
        Ok(Answer { option, kind, data })
    }

    fn unexpected(&self) -> Refusal {
        let (option, kind) = (self.option, self.kind);
        broken(&format!("answered option {option} by {kind:#x}"))
    }

    fn refusal(&self, name: &str) -> Refusal {
        let why = match self.kind {
            answer::ERR_UNKNOWN => format!("has no export '{name}'"),
            answer::ERR_TLS_REQD => "requires TLS, which is not supported here".into(),
            answer::ERR_POLICY => format!("does not allow export '{name}'"),
            kind if kind & answer::ERROR != 0 => format!("refuses export '{name}' ({kind:#x})"),
            _ => return self.unexpected(),
        };
        let text = &self.data[..self.data.len().min(wire::MAX_STRING)];
        match wire::readable(text) {
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
    let mut out = Vec::with_capacity(16 + data.len());
    out.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    put_string(&mut out, data);
    write(stream, &out)
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
            broken("did not answer in time; it may not allow one more connection")
        }
        _ => Refusal(format!("the handshake failed: {error}")),
    }
}
