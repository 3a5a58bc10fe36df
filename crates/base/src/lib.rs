//! Base images that come when they are needed: the process of this host that keeps one, and all that are kept.
//!
//! - [`keep`] is the keeper's whole life: `keeper` decides what is done about what happens; `users` are those who
//!   have the image; `queue` is what is fetched next, from `remote`; `cache` has the files, of which `durable` is
//!   true after a loss of power, too; `profile` is what boots read first;
//! - `directory` are all caches of this host.
//!
//! How a disk uses an image that is kept is in `fathom_storage::cached`.

mod about;
mod away;
mod cache;
mod cage;
mod directory;
mod durable;
mod keeper;
mod known;
mod landing;
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
