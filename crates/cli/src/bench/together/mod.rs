//! Loads of many hosts that begin together: agents (`fathom bench --serve`) wait on each host, each with a
//! disk to load; a client (`--client`) says what load it is to be, lets all of them go at once, and merges
//! what they have measured.
//!
//! - `wire` is what the two say to each other, `terms` the load;
//! - `agent` waits and loads, `client` asks; `fio` does the same by fio's servers,
//!   `noise` compares some with and without others;
//!   `told` is what comes of it.

mod agent;
mod client;
mod fio;
mod noise;
mod terms;
mod told;
mod wire;

pub use agent::serve;
pub use client::{Clients, run};
pub use fio::run as run_fio;
pub use noise::Noise;

/// Where agents listen, unless it is said.
const PORT: u16 = 9827;
