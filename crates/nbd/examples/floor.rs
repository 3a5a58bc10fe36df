//! A minimal NBD server: `floor SOCKET SIZE` serves one client after the other from memory. A
//! single call receives all requests that have arrived, and another call sends all replies. The
//! server checks and stores nothing, so its cost for each request is a lower bound for other
//! servers. `make bench` measures this server and others.

use fathom_nbd::protocol::{
    INIT_MAGIC, OPTION_MAGIC, OptionHeader, OptionReplyHeader, Replies, ReplyHeader, RequestHeader,
    command, export_flag, handshake_flag, opt, rep, simple_reply,
};
use std::io::{Error, ErrorKind, IoSlice, Read, Result, Write};
use std::os::unix::net::{UnixListener, UnixStream};

/// Requests answered by one call at most: two slices each, of IOV_MAX.
const AT_ONCE: usize = 512;

const REQUEST: usize = RequestHeader::COMPACT_LEN;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (socket, size) = (args.next(), args.next().and_then(|size| size.parse().ok()));
    let (Some(socket), Some(size)) = (socket, size) else {
        return Err(Error::other("usage: floor SOCKET BYTES"));
    };
    // Holes would be read faster.
    let disk = vec![7u8; size];
    for stream in UnixListener::bind(socket)?.incoming() {
        let mut stream = stream?;
        // A client that leaves is followed by the next.
        let _ = shake_hands(&mut stream, size as u64).and_then(|()| serve(&mut stream, &disk));
    }
    Ok(())
}

/// Runs the handshake until the client takes the export. No other option is supported.
fn shake_hands(stream: &mut UnixStream, size: u64) -> Result<()> {
    let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    stream.write_all(&INIT_MAGIC.to_be_bytes())?;
    stream.write_all(&OPTION_MAGIC.to_be_bytes())?;
    stream.write_all(&flags.to_be_bytes())?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; OptionHeader::LEN];
        stream.read_exact(&mut header)?;
        let OptionHeader { option, len } =
            OptionHeader::parse(&header).ok_or(ErrorKind::InvalidData)?;
        std::io::copy(&mut stream.take(len.into()), &mut std::io::sink())?;
        if option == opt::EXPORT_NAME {
            stream.write_all(&size.to_be_bytes())?;
            return stream.write_all(&export_flag::HAS_FLAGS.to_be_bytes());
        }
        let kind = rep::ERR_UNSUP;
        let reply = OptionReplyHeader {
            option,
            kind,
            len: 0,
        };
        stream.write_all(&reply.to_bytes())?;
    }
}

/// Reads return the data, and every other command gets a reply without an error. Fails if the
/// client has left or has sent an invalid request.
fn serve(stream: &mut UnixStream, disk: &[u8]) -> Result<()> {
    let mut requests = vec![0; AT_ONCE * REQUEST];
    let mut headers = vec![[0; ReplyHeader::SIMPLE_LEN]; AT_ONCE];
    let mut have = 0;
    loop {
        let received = stream.read(&mut requests[have..])?;
        if received == 0 {
            return Ok(());
        }
        have += received;
        let whole = have - have % REQUEST;
        let mut answers = Vec::with_capacity(2 * AT_ONCE);
        for (bytes, header) in requests[..whole].chunks(REQUEST).zip(&mut headers) {
            let request = RequestHeader::parse(Replies::Simple, bytes).map_err(Error::other)?;
            *header = simple_reply(0, request.cookie);
            answers.push(IoSlice::new(header));
            match request.command {
                command::READ => {
                    let range = request.offset as usize..(request.offset + request.len) as usize;
                    let data = disk.get(range).ok_or(ErrorKind::InvalidInput)?;
                    answers.push(IoSlice::new(data));
                }
                command::DISC => return Ok(()),
                _ => {}
            }
        }
        send(stream, &mut answers)?;
        requests.copy_within(whole..have, 0);
        have -= whole;
    }
}

fn send(stream: &mut UnixStream, mut answers: &mut [IoSlice<'_>]) -> Result<()> {
    while !answers.is_empty() {
        let sent = stream.write_vectored(answers)?;
        IoSlice::advance_slices(&mut answers, sent);
    }
    Ok(())
}
