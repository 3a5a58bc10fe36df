//! Validates request headers: returns the kind of command, or the error for the client.

use super::{Agreed, ExportView, Limits};
use fathom_nbd::protocol::{ErrorCode, Replies, RequestHeader, command, command_flag};

/// Kind of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `whole`: the reply carries all data in one chunk.
    Read {
        whole: bool,
    },
    Write,
    Flush,
    Trim,
    /// `unmap`: the disk may punch holes.
    WriteZeroes {
        unmap: bool,
    },
    Cache,
    /// `one`: the client wants a single extent.
    BlockStatus {
        one: bool,
    },
}

/// Result of checking a header that is in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Do(Kind),
    /// A block status whose payload holds its range and the contexts that the client wants.
    Filter,
    Disconnect,
}

/// An error reply: the error number, and a text for the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal(pub ErrorCode, pub &'static str);

/// Refusal of a write of zeroes that must be faster than a write of data.
///
/// The server does not offer the flag, but a client handed over by an older server may use it.
const NOT_FAST: Refusal = Refusal(
    ErrorCode::NotSupported,
    "zeroes may take as long to write as data",
);

const FUA: u16 = command_flag::FUA;

/// Returns the flags that a command may carry; FUA is allowed on every command.
fn known_flags(command: u16, agreed: Agreed) -> u16 {
    let wide = agreed.replies == Replies::Extended;
    let payload = if wide { command_flag::PAYLOAD_LEN } else { 0 };
    FUA | match command {
        command::READ if agreed.replies != Replies::Simple => command_flag::DF,
        command::WRITE => payload,
        command::WRITE_ZEROES => command_flag::NO_HOLE | command_flag::FAST_ZERO,
        command::BLOCK_STATUS => command_flag::REQ_ONE | payload,
        _ => 0,
    }
}

/// Checks everything in a header except the payload of a filtered block status.
#[inline]
pub(super) fn check(
    export: &ExportView,
    agreed: Agreed,
    header: &RequestHeader,
) -> Result<Verdict, Refusal> {
    let invalid = |text| Err(Refusal(ErrorCode::Invalid, text));
    if header.command == command::DISC {
        return Ok(Verdict::Disconnect);
    }
    if header.command > command::BLOCK_STATUS {
        return invalid("unknown command");
    }
    if header.flags & !known_flags(header.command, agreed) != 0 {
        return invalid("a flag that this command does not have");
    }
    let kind = kind(export, agreed, header)?;
    if kind == Kind::Flush {
        return match (header.offset, header.len) {
            (0, 0) => Ok(Verdict::Do(kind)),
            _ => invalid("a flush has neither offset nor length"),
        };
    }
    if matches!(kind, Kind::BlockStatus { .. }) && header.has_payload(agreed.replies) {
        return Ok(Verdict::Filter);
    }
    check_payload(agreed, header, kind)?;
    check_range(export, kind, header.offset, header.len)?;
    Ok(Verdict::Do(kind))
}

#[inline]
fn kind(export: &ExportView, agreed: Agreed, header: &RequestHeader) -> Result<Kind, Refusal> {
    let has = |flag| header.flags & flag != 0;
    let writes = matches!(
        header.command,
        command::WRITE | command::TRIM | command::WRITE_ZEROES
    );
    if writes && export.read_only {
        return Err(Refusal(ErrorCode::NotPermitted, "the export is read-only"));
    }
    let offered = |offered: bool, kind| {
        let refusal = Refusal(ErrorCode::Invalid, "the export does not offer this command");
        offered.then_some(kind).ok_or(refusal)
    };
    match header.command {
        command::READ => Ok(Kind::Read {
            whole: agreed.replies == Replies::Simple || has(command_flag::DF),
        }),
        command::WRITE => Ok(Kind::Write),
        command::FLUSH => Ok(Kind::Flush),
        command::TRIM => offered(export.discard.is_some(), Kind::Trim),
        command::CACHE => Ok(Kind::Cache),
        command::WRITE_ZEROES => {
            let unmap = !has(command_flag::NO_HOLE);
            let kind = offered(export.write_zeroes.is_some(), Kind::WriteZeroes { unmap });
            match has(command_flag::FAST_ZERO) {
                // No disk can guarantee that: file systems, encrypted images and parts of clusters
                // may need a write.
                true => kind.and(Err(NOT_FAST)),
                false => kind,
            }
        }
        _ => {
            let one = has(command_flag::REQ_ONE);
            let asked = agreed
                .allocation_context
                .or(agreed.bitmap_context)
                .is_some();
            offered(asked, Kind::BlockStatus { one })
        }
    }
}

#[inline]
fn check_payload(agreed: Agreed, header: &RequestHeader, kind: Kind) -> Result<(), Refusal> {
    let max = u64::from(Limits::MAX_PAYLOAD);
    match kind {
        Kind::Write if header.len > max => Err(Refusal(
            ErrorCode::Invalid,
            "longer than the maximum payload of 32 MiB",
        )),
        Kind::Read { whole: true } if header.len > max => {
            let code = match agreed.replies {
                Replies::Simple => ErrorCode::Invalid,
                _ => ErrorCode::Overflow,
            };
            Err(Refusal(code, "longer than 32 MiB"))
        }
        _ => Ok(()),
    }
}

/// Checks that the range lies within the export.
#[inline]
pub(super) fn check_range(
    export: &ExportView,
    kind: Kind,
    offset: u64,
    len: u64,
) -> Result<(), Refusal> {
    let end = offset.checked_add(len);
    if end.is_none_or(|end| end > export.size) {
        let code = match kind {
            Kind::Write | Kind::WriteZeroes { .. } => ErrorCode::NoSpace,
            _ => ErrorCode::Invalid,
        };
        return Err(Refusal(code, "beyond the end of the export"));
    }
    if len == 0 && matches!(kind, Kind::BlockStatus { .. }) {
        return Err(Refusal(ErrorCode::Invalid, "block status of 0 bytes"));
    }
    Ok(())
}
