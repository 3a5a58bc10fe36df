//! A stripe that comes.

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

/// What does not come within this time does not come.
const PATIENCE: Duration = Duration::from_secs(30);

/// A stripe, from where it comes to its place.
pub async fn land(remote: &Remote, data: Arc<File>, stripe: u32, at: u64) -> Result<(), Problem> {
    let bytes = timeout(PATIENCE, remote.fetch(stripe)).await;
    let bytes =
        bytes.unwrap_or_else(|_| Err(Problem::Away("its server does not respond".into())))?;
    let write = move || match is_zero(&bytes) {
        // There is nothing, which reads as this.
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
