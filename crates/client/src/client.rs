//! A client of a server's API.

use crate::error::ClientError;
use crate::lines::Lines;
use crate::server::{Server, Stream};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::http::request::Builder;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::cell::RefCell;
use std::os::unix::net;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::runtime::{self, Runtime};

/// Default timeout for a reply. Servers reply at once, unless they wait for storage or are stopped.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum length of a reply that is read, in bytes.
const MAX_ANSWER: usize = 64 << 20;
/// The characters of a path segment that are percent-encoded: all but the unreserved ones (RFC
/// 3986, section 2.3).
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// A client of one server. Each call opens a connection of its own.
#[derive(Debug)]
pub struct Client {
    runtime: Runtime,
    server: Server,
    /// An open connection, for the first call.
    connected: RefCell<Option<net::UnixStream>>,
}

impl Client {
    /// Connects to the server on this host at a socket. Fails if no process listens there.
    pub fn connect(path: &Path) -> Result<Client, ClientError> {
        let client = Client::new(Server::Local(path.to_owned()))?;
        let failed = |source| ClientError::of_connect(&client.server, source);
        let connected = net::UnixStream::connect(path).map_err(failed)?;
        connected.set_nonblocking(true).map_err(failed)?;
        client.connected.replace(Some(connected));
        Ok(client)
    }

    /// Returns a client of any server. For a remote server, the first call connects.
    pub fn of(server: Server) -> Result<Client, ClientError> {
        match server {
            Server::Local(path) => Client::connect(&path),
            remote => Client::new(remote),
        }
    }

    fn new(server: Server) -> Result<Client, ClientError> {
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        Ok(Client {
            runtime: runtime.map_err(|source| ClientError::of_connect(&server, source))?,
            server,
            connected: RefCell::default(),
        })
    }

    /// Returns a GET request. `place`: the segments of the path, not yet percent-encoded:
    /// `["v1", "disks", "a"]`.
    pub fn get(&self, place: &[&str]) -> Call<'_> {
        Call::new(self, Method::GET, place)
    }

    /// Returns a PUT request. `place` is as for [`Client::get`].
    pub fn put(&self, place: &[&str]) -> Call<'_> {
        Call::new(self, Method::PUT, place)
    }

    /// Returns a POST request. `place` is as for [`Client::get`].
    pub fn post(&self, place: &[&str]) -> Call<'_> {
        Call::new(self, Method::POST, place)
    }

    /// Returns a PATCH request. `place` is as for [`Client::get`].
    pub fn patch(&self, place: &[&str]) -> Call<'_> {
        Call::new(self, Method::PATCH, place)
    }

    /// Returns a DELETE request. `place` is as for [`Client::get`].
    pub fn delete(&self, place: &[&str]) -> Call<'_> {
        Call::new(self, Method::DELETE, place)
    }

    /// The server's location.
    pub fn server(&self) -> &Server {
        &self.server
    }

    async fn socket(&self) -> Result<TokioIo<Box<dyn Stream>>, ClientError> {
        let connected = self.connected.take();
        let Some(socket) = connected else {
            return self.server.connect().await;
        };
        let socket = UnixStream::from_std(socket);
        let socket = socket.map_err(|error| ClientError::of_connect(&self.server, error))?;
        Ok(TokioIo::new(Box::new(socket)))
    }

    fn strange(&self) -> ClientError {
        ClientError::NotFathom(self.server.to_string())
    }
}

/// Percent-encodes the segments of a path.
pub(crate) fn path_of(place: &[&str]) -> String {
    let encoded = |part: &&str| format!("/{}", utf8_percent_encode(part, ENCODED));
    place.iter().map(encoded).collect()
}

/// A request that has not been sent yet.
#[must_use]
pub struct Call<'a> {
    client: &'a Client,
    method: Method,
    path: String,
    headers: Vec<(&'static str, &'static str)>,
    body: Option<serde_json::Result<Vec<u8>>>,
    patience: Option<Duration>,
}

impl<'a> Call<'a> {
    fn new(client: &'a Client, method: Method, place: &[&str]) -> Call<'a> {
        Call {
            client,
            method,
            path: path_of(place),
            headers: Vec::new(),
            body: None,
            patience: Some(PATIENCE),
        }
    }

    /// Adds a boolean parameter if `is_set`. Absent parameters are false.
    pub fn flag(mut self, name: &str, is_set: bool) -> Call<'a> {
        if is_set {
            let mark = if self.path.contains('?') { '&' } else { '?' };
            self.path.push_str(&format!("{mark}{name}=true"));
        }
        self
    }

    /// Adds a parameter with a value.
    pub fn parameter(mut self, name: &str, value: &str) -> Call<'a> {
        let mark = if self.path.contains('?') { '&' } else { '?' };
        let value = utf8_percent_encode(value, ENCODED);
        self.path.push_str(&format!("{mark}{name}={value}"));
        self
    }

    /// Adds a header.
    pub fn header(mut self, name: &'static str, value: &'static str) -> Call<'a> {
        self.headers.push((name, value));
        self
    }

    /// Sets the body of the request to this value in JSON.
    pub fn json(mut self, body: &impl Serialize) -> Call<'a> {
        self.body = Some(serde_json::to_vec(body));
        self
    }

    /// Sets the timeout for a reply, or for the beginning of a stream.
    pub fn within(mut self, patience: Duration) -> Call<'a> {
        self.patience = Some(patience);
        self
    }

    /// Removes the timeout, for requests that wait for storage.
    pub fn patiently(mut self) -> Call<'a> {
        self.patience = None;
        self
    }

    /// Sends the request, and waits for the reply. An empty body is read as null.
    pub fn send<T: DeserializeOwned>(self) -> Result<T, ClientError> {
        let Call {
            client, patience, ..
        } = self;
        let request = self.into_request()?;
        let exchange = exchange(client, request);
        let answer = client.runtime.block_on(async {
            let Some(patience) = patience else {
                return exchange.await;
            };
            let late = |_| ClientError::Late {
                server: client.server.to_string(),
                after: patience,
            };
            tokio::time::timeout(patience, exchange)
                .await
                .map_err(late)?
        });
        let (status, body) = answer?;
        understand(status, &body).unwrap_or_else(|| Err(client.strange()))
    }

    /// Sends the request, and waits until the server begins a stream of lines.
    pub fn stream(self) -> Result<Lines<'a>, ClientError> {
        let (client, patience) = (self.client, self.patience.unwrap_or(PATIENCE));
        let request = self.into_request()?;
        client.runtime.block_on(async {
            let late = |_| ClientError::Late {
                server: client.server.to_string(),
                after: patience,
            };
            let response = tokio::time::timeout(patience, begin(client, request));
            let response = response.await.map_err(late)??;
            if response.status().is_success() {
                let body = response.into_body();
                return Ok(Lines::new(&client.runtime, &client.server, body));
            }
            let status = response.status();
            let body = collect(client, response.into_body()).await?;
            let refusal = understand::<Value>(status, &body).and_then(Result::err);
            Err(refusal.unwrap_or_else(|| client.strange()))
        })
    }

    fn into_request(self) -> Result<Request<Full<Bytes>>, ClientError> {
        let refused = |error: String| ClientError::Refused {
            status: StatusCode::BAD_REQUEST.as_u16(),
            kind: String::new(),
            text: format!("cannot express the request in JSON: {error}"),
        };
        let body = self.body.transpose().map_err(|e| refused(e.to_string()))?;
        let request = Request::builder()
            .method(self.method)
            .uri(self.path)
            .header(header::HOST, "fathom");
        let request = match body {
            Some(_) => request.header(header::CONTENT_TYPE, "application/json"),
            None => request,
        };
        let add = |request: Builder, (name, value): (&str, &str)| request.header(name, value);
        let request = self.headers.into_iter().fold(request, add);
        let request = request.body(Full::from(body.unwrap_or_default()));
        request.map_err(|error| refused(error.to_string()))
    }
}

async fn exchange(
    client: &Client,
    request: Request<Full<Bytes>>,
) -> Result<(StatusCode, Bytes), ClientError> {
    let response = begin(client, request).await?;
    let status = response.status();
    Ok((status, collect(client, response.into_body()).await?))
}

/// Sends a request, and receives the head of its reply.
async fn begin(
    client: &Client,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, ClientError> {
    let failed = |error| ClientError::of_connection(&client.server, error);
    let socket = client.socket().await?;
    let (mut sender, connection) = http1::handshake(socket).await.map_err(failed)?;
    // Errors of the connection are reported where the reply is read.
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(failed)
}

async fn collect(client: &Client, body: Incoming) -> Result<Bytes, ClientError> {
    collect_of(&client.server, body, MAX_ANSWER).await
}

/// Receives the whole body of a reply, which must be at most `limit` bytes.
pub(crate) async fn collect_of(
    server: &Server,
    body: Incoming,
    limit: usize,
) -> Result<Bytes, ClientError> {
    let body = Limited::new(body, limit).collect().await;
    let body = body.map_err(|error| match error.downcast::<hyper::Error>() {
        Ok(error) => ClientError::of_connection(server, *error),
        // The body is too long.
        Err(_) => ClientError::NotFathom(server.to_string()),
    })?;
    Ok(body.to_bytes())
}

/// Converts a reply to its value, or to the server's error. None: a Fathom server does not reply
/// like this.
pub(crate) fn understand<T: DeserializeOwned>(
    status: StatusCode,
    body: &[u8],
) -> Option<Result<T, ClientError>> {
    let body = if body.is_empty() { b"null" } else { body };
    if status.is_success() {
        return serde_json::from_slice(body).ok().map(Ok);
    }
    let problem: Value = serde_json::from_slice(body).ok()?;
    let text = problem.get("detail")?.as_str()?.to_owned();
    let kind = problem.get("type").and_then(Value::as_str);
    Some(Err(ClientError::Refused {
        status: status.as_u16(),
        kind: kind.unwrap_or_default().to_owned(),
        text,
    }))
}
