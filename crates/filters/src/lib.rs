//! Filters: layers between a disk and its users that delay, limit, break, log or otherwise change
//! its requests.
//!
//! [`wrap`] puts a [`Filter`] around a [`Disk`](fathom_core::Disk). Any number of filters can be
//! combined in any order. The filter owns the state that all workers share, behind a lock that no
//! request takes. The state of one worker is a [`Layer`] above that worker's channel. Settings can
//! be changed while requests are served. A layer adopts all new settings together when its worker
//! is asked to look ([`WorkerHandle::look`](fathom_core::WorkerHandle::look)).
//!
//! No filter delays a drain: when a source leaves, its delayed requests continue at once, or fail.
//!
//! # Requests in a layer
//!
//! - A layer that holds a request back asks for a wake-up
//!   ([`Cx::wake_at`](fathom_core::Cx::wake_at)). The worker sleeps until then, and calls
//!   [`Channel::timer`](fathom_core::Channel::timer).
//! - The worker of a paused disk pops nothing ([`Cx::close`](fathom_core::Cx::close)): requests
//!   stay with their source.
//! - Completions are not passed up by calls. After each call of the layer below, a layer examines
//!   the requests that have completed meanwhile
//!   ([`Cx::completed_since`](fathom_core::Cx::completed_since)).
//! - `cow` is not a layer: its overlay is an image of the backing chain.

mod about;
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
