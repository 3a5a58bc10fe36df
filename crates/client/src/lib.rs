//! How a running server of disks is found and asked: HTTP and JSON on a Unix socket, as
//! `docs/openapi.json` describes it.

mod client;
mod error;
pub mod place;

pub use client::{Call, Client};
pub use error::ClientError;
