//! Many servers, asked at once.

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

/// So many at once. The others wait for their turn.
const AT_ONCE: usize = 256;
/// Of a server that is asked for many things, all answers may take so many times as long as one.
const ANSWERS: u32 = 12;
/// The longest answer that is read, in bytes: there may be as many at once.
const MAX_ANSWER: usize = 16 << 20;

/// A connection to one server, over which it is asked one thing after the other.
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
        // It ends with the sender; what becomes of it is told where the answer is read.
        tokio::spawn(connection);
        Ok(Session {
            server,
            patience,
            sender,
        })
    }

    /// `place`: what stands between the slashes, as it is meant: `["v1", "disks", "a"]`.
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

/// Asks all `servers`, some hundreds at once; `take` gets what comes of each as it comes. One that lets wait
/// for an answer longer than `patience`, or for all of them [`ANSWERS`] times as long, is given up: so all of
/// it takes no longer than that for each few hundred.
///
/// # Errors
/// When there can be no runtime.
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
    // Names that are still being looked up are nobody's any more.
    runtime.shutdown_background();
    Ok(())
}

/// Lets this process have as many connections as it may.
pub fn allow_files() {
    let limits = getrlimit(Resource::Nofile);
    let current = limits.maximum;
    // Where that is refused, some servers cannot be asked, and say so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current, ..limits });
}
