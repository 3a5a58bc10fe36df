//! Exports of NBD servers as a kind of storage.

use super::{DEFAULT_RECONNECT, NbdDisk, NbdOptions, NbdUri};
use crate::file::Cache;
use crate::kind::{Kind, OpenOptions, Opened, Place};
use fathom_core::DiskError;
use std::sync::Arc;

pub(crate) const KIND: Kind = Kind {
    name: "nbd",
    form: "nbd://HOST[:PORT]/EXPORT, nbd+unix:///EXPORT?socket=PATH, nbd+vsock://CID[:PORT]/EXPORT, \
           by TLS nbds://...",
    what: "Export of an NBD server",
    prefixes: &[
        "nbd://",
        "nbd+unix://",
        "nbd+vsock://",
        "nbds://",
        "nbds+unix://",
        "nbds+vsock://",
    ],
    images: false,
    network: false,
    locks: false,
    options: &["server-timeout", "server-reconnect", "server-connections"],
    parse: |text| {
        let uri: NbdUri = text.to_string_lossy().parse()?;
        Ok(Arc::new(uri))
    },
};

impl Place for NbdUri {
    fn open(&self, options: &OpenOptions) -> Result<Opened, DiskError> {
        let default = NbdOptions::default();
        let (timeout, reconnect) = (options.server_timeout, options.server_reconnect);
        let connections = options.server_connections.map(usize::from);
        let disk = NbdDisk::connect(
            self,
            NbdOptions {
                read_only: options.read_only,
                discard: options.discard,
                writethrough: options.cache == Cache::Writethrough,
                timeout: timeout.map_or(default.timeout, |timeout| timeout.0),
                reconnect: options.server_is_sought.then(|| match reconnect {
                    None => DEFAULT_RECONNECT,
                    Some(timeout) => timeout.0.unwrap_or_default(),
                }),
                connections: connections.unwrap_or(default.connections),
                ..default
            },
        )?;
        // Each worker has a connection of its own. (The channel of a second worker would fail, too,
        // but a server may delay the handshake until the first client disconnects.)
        match options.workers > 1 && !disk.export().can_multi_conn() {
            true => Err(disk.takes_one_only()),
            false => Ok(Opened {
                halt: Some(disk.halt()),
                ..Opened::new(disk)
            }),
        }
    }
}
