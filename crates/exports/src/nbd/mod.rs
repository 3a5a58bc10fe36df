//! A disk for anything that speaks NBD.
//!
//! "NBD" in comments is doc/proto.md of the NetworkBlockDevice project, with
//! its extension EXTENDED_HEADERS.
//!
//! - `wire` is what goes over the connection once it serves requests,
//! - `connection` serves them: a [`Source`](fathom_core::Source) of one of
//!   the disk's workers.

pub mod connection;
pub mod wire;
