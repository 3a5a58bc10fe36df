//! Reads a server's replies on a blocking transport.

use fathom_nbd::protocol::{
    ChunkHeader, REPLY_FLAG_DONE, Replies, ReplyHeader, chunk, errno, u32_at,
};
use fathom_nbd::transport::Transport;
use std::io::{self, Read};

/// Maximum length of a chunk in bytes: enough for the longest error text and for the extents.
const MAX_CHUNK: u64 = 8 << 10;

pub(super) struct Answers<'a> {
    transport: &'a mut Transport,
    replies: Replies,
}

impl<'a> Answers<'a> {
    pub(super) fn new(transport: &'a mut Transport, replies: Replies) -> Answers<'a> {
        Answers { transport, replies }
    }

    /// Returns the cookie of the next request that is done. Fails if the request failed.
    pub(super) fn done(&mut self) -> io::Result<u64> {
        loop {
            match self.header()? {
                ReplyHeader::Simple { error: 0, cookie } => return Ok(cookie),
                ReplyHeader::Simple { error, .. } => return Err(server_error(error)),
                ReplyHeader::Chunk(header) => {
                    let payload = self.payload(header)?;
                    if header.kind & chunk::ERROR_BIT != 0 {
                        return Err(server_error(u32_at(&payload, 0)));
                    }
                    if header.flags & REPLY_FLAG_DONE != 0 {
                        return Ok(header.cookie);
                    }
                }
            }
        }
    }

    pub(super) fn header(&mut self) -> io::Result<ReplyHeader> {
        let replies = self.replies;
        let mut bytes = vec![0; ReplyHeader::SIMPLE_LEN];
        self.transport.read_exact(&mut bytes)?;
        loop {
            let parsed = ReplyHeader::parse(replies, &bytes);
            match parsed.map_err(|_| io::Error::other("sent a malformed reply"))? {
                Some((header, _)) => return Ok(header),
                None => {
                    let have = bytes.len();
                    let whole = match replies {
                        Replies::Extended => ReplyHeader::EXTENDED_LEN,
                        _ => ReplyHeader::STRUCTURED_LEN,
                    };
                    bytes.resize(whole, 0);
                    self.transport.read_exact(&mut bytes[have..])?;
                }
            }
        }
    }

    pub(super) fn payload(&mut self, header: ChunkHeader) -> io::Result<Vec<u8>> {
        let is_error = header.kind & chunk::ERROR_BIT != 0;
        if header.len > MAX_CHUNK || is_error && header.len < 6 {
            return Err(io::Error::other("sent a malformed chunk"));
        }
        let mut payload = vec![0; header.len as usize];
        self.transport.read_exact(&mut payload)?;
        Ok(payload)
    }
}

fn server_error(error: u32) -> io::Error {
    io::Error::from_raw_os_error(errno(error))
}
