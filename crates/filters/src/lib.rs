//! Filters: what comes between whoever asks for a disk and the disk, to make
//! it as slow or as broken as you like.
//!
//! A [`Filter`] is put around a [`Disk`](fathom_core::Disk) by [`wrap`], any
//! number in any order. What all workers share is the filter's, behind a lock
//! that no request takes; what one worker needs is a [`Layer`] above that
//! worker's channel. Settings can be changed while requests are served: a
//! layer sees the new ones, all together, when its worker is told to look
//! ([`WorkerHandle::look`](fathom_core::WorkerHandle::look)).
//!
//! No filter holds back a drain: when a source leaves, what is held back of
//! its requests goes on at once, or fails.

mod about;
mod buffer;
mod cow;
mod delay;
mod fault;
mod filter;
mod filtered;
mod held;
mod layer;
mod live;
mod log;
mod pause;
mod random;
mod readahead;
mod readonly;
mod registry;
mod segments;
mod spec;
mod throttle;
mod values;

pub use about::{About, Opt};
pub use cow::{COW, Cow};
pub use filter::Filter;
pub use filtered::wrap;
pub use layer::Layer;
pub use registry::{FILTERS, Filters, find};
pub use spec::Spec;
pub use throttle::Groups;
