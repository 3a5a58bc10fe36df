//! Bodies of fuzz targets: nothing that a client sends may do more than end
//! its connection. Not a public interface.

use super::export::{Export, Exports, InUse};
use super::handshake::{Denied, Handshake, Host, Outcome, Transport};
use super::tls::Tls;
use fathom_core::{Disk, WorkerHandle};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Handshakes on disks that nobody serves.
pub struct Handshakes {
    exports: Exports,
}

impl Handshakes {
    /// The disk is exported several times.
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

    /// A whole connection's worth of bytes.
    pub fn run(&self, data: &[u8]) {
        let (ours, mut theirs) = UnixStream::pair().expect("a socket pair");
        // What fits into the socket. Replies to it fit, too: the shortest
        // option has 16 bytes, the longest reply to one some 300.
        let data = &data[..data.len().min(4 << 10)];
        theirs.write_all(data).expect("room in the socket");
        let shut = theirs.shutdown(std::net::Shutdown::Write);
        shut.expect("a connected socket");
        let deadline = Instant::now() + Duration::from_secs(5);
        let transport = Transport::new(Arc::new(OwnedFd::from(ours)), deadline);
        let (outcome, _) = Handshake::new(self, transport).run();
        if let Ok(Outcome::Agreed(agreement)) = outcome {
            let of = agreement.in_use.export().view();
            assert_eq!(agreement.view, of);
        }
    }
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
