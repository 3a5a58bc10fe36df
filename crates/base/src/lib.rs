//! Base images that are fetched on demand, and cached on this host by one keeper process per image.
//!
//! - [`keep`] runs a keeper from start to end. `keeper` handles events, and `users` are the
//!   processes that use the image. `queue` selects the next stripe to fetch from `remote`. `cache`
//!   contains the files; `durable` is the part of them that survives a power failure. `profile` is
//!   what boots read first.
//! - `directory` manages all caches of this host.
//!
//! `fathom_storage::cached` implements how a disk uses a cached image.

mod about;
mod backoff;
mod cache;
mod cage;
mod directory;
mod durable;
mod fetch;
mod keeper;
mod known;
mod life;
mod problem;
mod profile;
mod queue;
mod rate;
mod remote;
mod users;

pub use about::{About, Origin};
pub use directory::{Listed, list, remove};
pub use known::check_greeting;
pub use life::keep;
pub use profile::text_of as profile_of;
