//! The API of a server: HTTP/1.1 and JSON on a Unix socket, which `/openapi.json` describes.
//!
//! The API has a thread and an asynchronous runtime of its own. This thread passes requests to a
//! [`Server`], and never touches a disk itself.
//!
//! - `sockets` has the sockets at which clients connect, `entry` the directory in which they find
//!   servers;
//! - `clients` limits connections, `connection` serves one, `rights` says what its client may do;
//! - `routes` lists all routes; `disks`, `backup`, `bitmaps`, `snapshots`, `mirror`, `jobs`,
//!   `groups` and `server` have those that change or show something, and `request` reads their
//!   parameters and bodies;
//! - `stream` sends events, `metrics` the page of metrics, `live` measurements every second, `page`
//!   an HTML page of these;
//! - `web` serves metrics and the HTML page by TCP, `remote` everything that only reads by TLS;
//! - `problem` is an error (RFC 9457), `tag` the condition of a request (RFC 9110).

mod api;
mod backup;
mod bitmaps;
mod clients;
mod connection;
mod described_problems;
mod disks;
mod entry;
mod error;
mod groups;
mod handle;
mod jobs;
mod live;
mod metrics;
mod mirror;
mod options;
mod page;
mod pages;
mod problem;
mod remote;
mod request;
mod rights;
mod routes;
mod server;
mod snapshots;
mod sockets;
mod stream;
mod tag;
mod web;

pub use api::{Api, ApiState};
pub use error::OpenError;
pub use handle::Server;
pub use options::{ApiOptions, RemoteOptions};
pub use rights::Groups;
pub use sockets::{AdoptedSockets, ApiSockets, SocketsState};
