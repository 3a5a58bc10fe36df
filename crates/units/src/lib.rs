//! Sizes, durations and dates as people write and read them: one spelling for every option, file
//! and report; and addresses as people may read them.

mod date;
mod duration;
mod redact;
mod size;
mod timeout;

pub use date::Utc;
pub use duration::{parse_duration, parse_seconds, short_duration};
pub use redact::redacted;
pub use size::{Size, parse_size, short_size};
pub use timeout::Timeout;
