//! Loads on many hosts that begin together.
//!
//! An agent (`fathom bench --serve`) waits on each host with a disk to load. A client (`--client`)
//! sends the load, starts all agents at once, and merges the results.
//!
//! - `wire` is the protocol between both, and `terms` the load in it;
//! - `agent` and `client` are the two sides; `fio` uses fio's servers instead;
//! - `noise` compares the results of some hosts with and without the load of others;
//! - `told` merges the results.

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

/// Default port of agents.
const PORT: u16 = 9827;
