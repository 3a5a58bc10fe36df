//! Serves a client's connection, over any transport.

use axum::Router;
use fathom_units::cause;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_io_timeout::TimeoutStream;

/// Time within which a client must send the whole head of a request. Otherwise, the connection is
/// closed.
const HEAD: Duration = Duration::from_secs(10);
/// Time after which a connection is closed whose client receives nothing of a reply.
const STALL: Duration = Duration::from_secs(10);
/// Maximum length of a request's head, in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Time for which accepting pauses after an error such as too many open files.
pub const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Serves a connection until it is closed.
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
