//! A client of running servers: HTTP and JSON, as `docs/openapi.json` describes them, over a Unix
//! socket, or over TLS from another host. `fleet` queries many servers at the same time.

mod client;
mod error;
pub mod fleet;
mod lines;
pub mod place;
mod server;

pub use client::{Call, Client};
pub use error::ClientError;
pub use lines::Lines;
pub use server::{Credentials, PORT, Remote, Server, split_host};
