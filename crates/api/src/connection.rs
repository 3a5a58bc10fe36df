//! A client's connection, by whatever way it came.

use axum::Router;
use fathom_units::cause;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_io_timeout::TimeoutStream;

/// A connection that sends no request for so long, or not all of its head, is closed.
const HEAD: Duration = Duration::from_secs(10);
/// One that takes in nothing of its answer for so long is, too.
const STALL: Duration = Duration::from_secs(10);
/// Of a request's head.
const MAX_HEAD: usize = 16 << 10;
/// How long accepting pauses when it fails for want of resources.
pub const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Until it is closed.
pub async fn serve(client: impl AsyncRead + AsyncWrite + Send + 'static, router: Router) {
    let mut client = TimeoutStream::new(client);
    client.set_write_timeout(Some(STALL));
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(MAX_HEAD)
        .serve_connection(
            TokioIo::new(Box::pin(client)),
            TowerToHyperService::new(router),
        );
    if let Err(error) = served.await {
        tracing::debug!("API: a client's connection failed: {}", cause(error));
    }
}
