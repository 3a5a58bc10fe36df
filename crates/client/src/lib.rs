//! How a running server of disks is found and asked: HTTP and JSON, as `docs/openapi.json` describes it, on
//! a Unix socket, or by TLS from another host. `fleet` asks many at once.

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
