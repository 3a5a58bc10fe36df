//! Bodies of fuzz targets: a client can do no more than end its own connection. Not a public
//! interface.

use super::export::{Export, Exports, InUse};
use super::handshake::{Denied, Failure, Handshake, Host, Outcome};
use super::tls::Tls;
use fathom_core::{Disk, WorkerHandle};
use fathom_nbd::protocol::OptionHeader;
use fathom_nbd::transport::Transport;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Handshakes for disks that no worker serves.
pub struct Handshakes {
    exports: Exports,
}

impl Handshakes {
    /// Exports the disk under two names.
    pub fn new(disk: Arc<dyn Disk>) -> Handshakes {
        let workers: Arc<[WorkerHandle]> = Arc::new([]);
        let export = |name: &str, description: &str| {
            Export::new(
                name.into(),
                description.into(),
                disk.clone(),
                workers.clone(),
            )
        };
        let list = vec![export("a", ""), export("b", "the second one")];
        let exports = Exports::new(list).expect("names that differ");
        Handshakes { exports }
    }

    /// Runs one connection. The first byte of `data` decides whether the rest is sent as it is or
    /// turned into options that are nearly valid. Returns true if the handshake succeeds.
    pub fn run(&self, data: &[u8]) -> bool {
        match data.split_first() {
            Some((kind, rest)) if kind % 4 == 0 => self.converse(rest),
            Some((_, rest)) => self.converse(&script(rest)),
            None => false,
        }
    }

    fn converse(&self, data: &[u8]) -> bool {
        let (ours, mut theirs) = UnixStream::pair().expect("a socket pair");
        // Bytes that fit into the socket. The replies fit, too: the shortest option has 16 bytes,
        // and the longest reply to one about 300.
        let data = &data[..data.len().min(4 << 10)];
        theirs.write_all(data).expect("room in the socket");
        let shut = theirs.shutdown(std::net::Shutdown::Write);
        shut.expect("a connected socket");
        let deadline = Instant::now() + Duration::from_secs(5);
        let transport = Transport::new(Arc::new(OwnedFd::from(ours)), deadline);
        let (outcome, _) = Handshake::new(self, transport).run();
        match outcome {
            Ok(Outcome::Agreed(agreement)) => {
                assert_eq!(agreement.view, agreement.in_use.export().view());
                true
            }
            Ok(Outcome::Over) => false,
            Err(Failure::TimedOut) => panic!("it waits for a client that is gone"),
            Err(_) => false,
        }
    }
}

/// Returns the client's flags and a series of options. Numbers are kept small, so that many options
/// match an existing export.
fn script(data: &[u8]) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    let mut rest = data.iter().copied();
    while let Some(option) = rest.next() {
        let mut body = Vec::new();
        for _ in 0..rest.next().unwrap_or(0) % 8 {
            match rest.next().unwrap_or(0) {
                // Most numbers are small.
                n @ 0..64 => body.extend(u32::from(n).to_be_bytes()),
                n @ 64..96 => body.extend(u16::from(n - 64).to_be_bytes()),
                96..128 => body.extend(b"\0\0\0\x01a"),
                128..160 => body.extend(b"\0\0\0\x0fbase:allocation"),
                n => body.push(n),
            }
        }
        // The length is right, or slightly too large.
        let off = if option & 0xe0 == 0xe0 {
            option >> 2 & 7
        } else {
            0
        };
        let header = OptionHeader {
            option: u32::from(option % 13),
            len: body.len() as u32 + u32::from(off),
        };
        bytes.extend(header.to_bytes());
        bytes.extend(body);
    }
    bytes
}

impl Host for Handshakes {
    fn exports(&self) -> &Exports {
        &self.exports
    }

    fn tls(&self) -> Option<&Tls> {
        None
    }

    fn admit(&self, export: &Arc<Export>) -> Result<InUse, Denied> {
        InUse::new(export).map_err(Denied::NotNow)
    }
}
