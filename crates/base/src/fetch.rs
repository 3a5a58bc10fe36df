//! Fetches a stripe and writes it to the cache.

use crate::problem::Problem;
use crate::remote::Remote;
use fathom_core::is_zero;
use fathom_units::cause;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// Timeout for fetching a stripe.
const PATIENCE: Duration = Duration::from_secs(30);

/// Fetches a stripe from the remote and writes it to the data file at `at`.
pub async fn fetch_stripe(
    remote: &Remote,
    data: Arc<File>,
    stripe: u32,
    at: u64,
) -> Result<(), Problem> {
    let bytes = timeout(PATIENCE, remote.fetch(stripe)).await;
    let bytes =
        bytes.unwrap_or_else(|_| Err(Problem::Away("its server does not respond".into())))?;
    let write = move || match is_zero(&bytes) {
        // The file has a hole there, which reads as zeroes.
        true => Ok(()),
        false => data.write_all_at(&bytes, at),
    };
    let written = spawn_blocking(write).await;
    let written = written.unwrap_or_else(|error| Err(io::Error::other(error)));
    written.map_err(|error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Problem::Full,
        _ => Problem::Away(format!("cannot write to its cache: {}", cause(error))),
    })
}
