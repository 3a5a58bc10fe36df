//! The server that has the disk.

use crate::copy::Failure;
use fathom_core::{Changes, DiskError};
use fathom_nbd::NbdUri;
use fathom_storage::{ChangesClient, NbdDisk, NbdOptions};
use fathom_units::cause;
use std::time::Duration;

/// What is asked for at once: so much is copied again if no answer comes.
const RANGE: u64 = 64 << 30;

/// So long a server that is away is waited for with what is under way; then all is begun again.
const RECONNECT: Duration = Duration::from_secs(5);
const TIMEOUT: Duration = Duration::from_secs(10);

/// What is to be copied, and whether anything is known of it.
pub(super) struct Todo {
    changes: Changes,
    /// The server was told to note what changes, and all that it has said is here.
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

/// Connected, by a client that knows of changes; the size of the disk is that of `todo`. All is to be done
/// if the server does not know what it has told: then `true` comes, too, and it may not know either that
/// the disk was taken over.
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

/// Likewise, of a disk of `ours` bytes: `true` comes, too, unless the server `is_known` to have been told of this move
/// and still knows it.
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

/// Adds what has changed to what is to be done: all of it, or it fails.
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
            // It has said no: what it knows is of no use.
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

/// Its data.
pub(super) fn open(uri: &NbdUri) -> Result<NbdDisk, DiskError> {
    let options = NbdOptions {
        read_only: true,
        reconnect: Some(RECONNECT),
        timeout: Some(TIMEOUT),
        ..NbdOptions::default()
    };
    NbdDisk::connect(uri, options)
}
