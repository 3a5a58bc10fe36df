//! How a running server of disks is found and asked: HTTP and JSON on a Unix socket, as
//! `docs/openapi.json` describes it.

mod client;
mod error;
mod lines;
pub mod place;

pub use client::{Call, Client};
pub use error::ClientError;
pub use lines::Lines;
