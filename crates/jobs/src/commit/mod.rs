//! Copies the data of intermediate images into an image below them while the disk is in use.
//! Afterwards the image above them needs only the lower image.
//!
//! - `terms` are the parameters, and `handle` starts the job, which is controlled like all jobs
//!   that follow their disk (`following`);
//! - `committer` is the thread: it copies the data, then names the lower image in the header of
//!   the image above the intermediate ones.
//!
//! Users change the top image only, so nothing is copied twice. Data written to the lower image is
//! hidden by the intermediate images, which have the same data. Therefore the chain reads as the
//! same disk at any time.

mod committer;
mod handle;
mod terms;

pub use handle::start;
pub use terms::Terms;
