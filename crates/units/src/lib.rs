//! Reads and formats sizes, durations and dates, so that every option, file and report spells them
//! in the same way.
//!
//! Also has the common parts of messages: causes of errors, suggestions for misspelt names, and
//! URLs without their secrets.

mod cause;
mod date;
mod duration;
mod nearest;
mod new_size;
mod redact;
mod size;
mod timeout;
mod unknown;

pub use cause::cause;
pub use date::Utc;
pub use duration::{parse_duration, parse_seconds, short_duration};
pub use nearest::{did_you_mean, nearest};
pub use new_size::NewSize;
pub use redact::redacted;
pub use size::{Size, parse_size, short_size};
pub use timeout::Timeout;
pub use unknown::{serde_text, unknown_name};
