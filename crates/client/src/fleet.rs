//! Sends requests to many servers at the same time.

use crate::client::{collect_of, path_of, understand};
use crate::error::ClientError;
use crate::server::Server;
use futures_util::StreamExt;
use futures_util::stream;
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, header};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::de::DeserializeOwned;
use std::io;
use std::time::Duration;
use tokio::runtime;
use tokio::time::timeout;

/// Maximum number of servers that are queried at the same time.
const AT_ONCE: usize = 256;
/// Time limit of all replies of a server, as a multiple of the time limit of one reply.
const ANSWERS: u32 = 12;
/// Maximum length of a reply that is read, in bytes. [`AT_ONCE`] replies may be in memory at the
/// same time.
const MAX_ANSWER: usize = 16 << 20;

/// A connection to one server, for one request after another.
pub struct Session<'a> {
    server: &'a Server,
    patience: Duration,
    sender: SendRequest<Full<Bytes>>,
}

impl<'a> Session<'a> {
    async fn begin(server: &'a Server, patience: Duration) -> Result<Session<'a>, ClientError> {
        let socket = server.connect().await?;
        let (sender, connection) = http1::handshake(socket)
            .await
            .map_err(|error| ClientError::of_connection(server, error))?;
        // The connection ends with its sender, and errors are reported where the reply is read.
        tokio::spawn(connection);
        Ok(Session {
            server,
            patience,
            sender,
        })
    }

    /// Sends a GET request, and waits for the reply. `place`: the segments of the path, not yet
    /// percent-encoded: `["v1", "disks", "a"]`.
    pub async fn get<T: DeserializeOwned>(&mut self, place: &[&str]) -> Result<T, ClientError> {
        let patience = self.patience;
        let late = late(self.server, patience);
        timeout(patience, self.exchange(place))
            .await
            .map_err(|_| late)?
    }

    async fn exchange<T: DeserializeOwned>(&mut self, place: &[&str]) -> Result<T, ClientError> {
        let failed = |error| ClientError::of_connection(self.server, error);
        let strange = || ClientError::NotFathom(self.server.to_string());
        let request = Request::get(path_of(place)).header(header::HOST, "fathom");
        let request = request.body(Full::default()).map_err(|_| strange())?;
        let answer = self.sender.send_request(request).await.map_err(failed)?;
        let status = answer.status();
        let body = collect_of(self.server, answer.into_body(), MAX_ANSWER).await?;
        understand(status, &body).unwrap_or_else(|| Err(strange()))
    }
}

fn late(server: &Server, after: Duration) -> ClientError {
    let server = server.to_string();
    ClientError::Late { server, after }
}

/// Queries all `servers`, up to [`AT_ONCE`] at the same time, and calls `take` with the index and
/// the result of each. The result is an error if a reply takes longer than `patience`, or all
/// replies of a server take [`ANSWERS`] times as long. The whole call takes at most that time for
/// each [`AT_ONCE`] servers.
///
/// # Errors
/// An error if the runtime cannot be created.
pub fn ask_all<T>(
    servers: &[Server],
    patience: Duration,
    ask: impl AsyncFn(&mut Session<'_>) -> Result<T, ClientError>,
    mut take: impl FnMut(usize, Result<T, ClientError>),
) -> io::Result<()> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let one = async |server| {
        let begun = timeout(patience, Session::begin(server, patience)).await;
        let mut session = begun.map_err(|_| late(server, patience))??;
        let all = patience * ANSWERS;
        timeout(all, ask(&mut session))
            .await
            .map_err(|_| late(server, all))?
    };
    runtime.block_on(async {
        let all = stream::iter(servers.iter().enumerate());
        let all = all.map(async |(index, server)| (index, one(server).await));
        let mut answers = std::pin::pin!(all.buffer_unordered(AT_ONCE));
        while let Some((index, answer)) = answers.next().await {
            take(index, answer);
        }
    });
    // Lookups of host names can still run on other threads, and their results are not needed.
    runtime.shutdown_background();
    Ok(())
}

/// Raises the limit of open files to the maximum.
pub fn allow_files() {
    let limits = getrlimit(Resource::Nofile);
    let current = limits.maximum;
    // (If the limit cannot be raised, requests to some servers fail with an error.)
    let _ = setrlimit(Resource::Nofile, Rlimit { current, ..limits });
}
