//! The server that has the disk.

use crate::copy::Failure;
use fathom_core::{Changes, DiskError};
use fathom_nbd::NbdUri;
use fathom_storage::{ChangesClient, NbdDisk, NbdOptions};
use fathom_units::cause;
use std::time::Duration;

/// Maximum bytes per query for changes. A range whose reply is lost is copied again.
const RANGE: u64 = 64 << 30;

/// Time to reconnect to the server with requests in flight, and timeout of a request.
/// After that, the attempt fails and starts again.
const RECONNECT: Duration = Duration::from_secs(5);
const TIMEOUT: Duration = Duration::from_secs(10);

/// The ranges to copy, and whether the changes on the server are known.
pub(super) struct Todo {
    changes: Changes,
    /// Whether the server records changes for this move, and all changes it reported are here.
    pub(super) is_known: bool,
}

impl Todo {
    pub(super) fn new(size: u64) -> Todo {
        Todo {
            changes: Changes::new(size),
            is_known: false,
        }
    }

    pub(super) fn all(&self) {
        self.changes.mark(0, self.changes.size());
    }

    pub(super) fn changes(&self) -> &Changes {
        &self.changes
    }
}

/// Connects to the server, which records changes from then on. The disk must have the size of
/// `todo`.
///
/// If the server does not know which changes it has reported, the whole disk is marked, and `true`
/// is returned, too. In this case the server may not know of the takeover either.
pub(super) fn connect(
    uri: &NbdUri,
    id: &str,
    todo: &mut Todo,
) -> Result<(ChangesClient, bool), DiskError> {
    let is_known = std::mem::take(&mut todo.is_known);
    let (client, is_new) = reach(uri, id, todo.changes.size(), is_known)?;
    if is_new {
        todo.all();
    }
    todo.is_known = true;
    Ok((client, is_new))
}

/// Connects to the server of a disk of `ours` bytes.
///
/// `is_known` says whether the server has learned of this move before. Also returns false if the
/// server still knows the move, otherwise true.
pub(super) fn reach(
    uri: &NbdUri,
    id: &str,
    ours: u64,
    is_known: bool,
) -> Result<(ChangesClient, bool), DiskError> {
    if is_known && let Ok(client) = ChangesClient::connect(uri, id, false) {
        return Ok((client, false));
    }
    let client = ChangesClient::connect(uri, id, true)?;
    let theirs = client.size();
    if theirs != ours {
        return Err(DiskError::Unusable {
            path: uri.as_str().into(),
            problem: format!(
                "the disk has {theirs} bytes there and {ours} here; both must have the same size"
            ),
        });
    }
    Ok((client, true))
}

/// Fetches all changes and marks them in `todo`.
pub(super) fn fetch(
    client: &mut ChangesClient,
    todo: &mut Todo,
    stops: &dyn Fn() -> bool,
) -> Result<(), Failure> {
    let size = todo.changes.size();
    let mut at = 0;
    while at < size {
        if stops() {
            return Err(Failure::Stopped);
        }
        let len = RANGE.min(size - at);
        let told = client.next(at, len);
        let told = told.map_err(|error| {
            todo.changes.mark(at, len);
            // The server has refused: what it knows of this move is unusable.
            todo.is_known &= !matches!(error, DiskError::Unusable { .. });
            Failure::Problem(cause(error))
        })?;
        for run in told {
            if run.changed {
                todo.changes.mark(at, run.len);
            }
            at += run.len;
        }
    }
    Ok(())
}

/// Connects to the server for the disk's data.
pub(super) fn open(uri: &NbdUri) -> Result<NbdDisk, DiskError> {
    let options = NbdOptions {
        read_only: true,
        reconnect: Some(RECONNECT),
        timeout: Some(TIMEOUT),
        ..NbdOptions::default()
    };
    NbdDisk::connect(uri, options)
}
