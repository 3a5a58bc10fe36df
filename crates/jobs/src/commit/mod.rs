//! What images in the middle of a chain have is brought into one below them while users go on, until the image above them
//! needs only that one.
//!
//! - `terms` are what is asked for, and `handle` starts it; it is asked as all are that follow their disk (`following`);
//! - `committer` is what the thread does: it copies, and at the end it names the image below in the header of the one above.
//!
//! Users change the first image only, so nothing is copied twice. What is written below is hidden by those in the middle,
//! which have it, too: whoever goes by the chain has the same disk all the time.

mod committer;
mod handle;
mod terms;

pub use handle::start;
pub use terms::Terms;
