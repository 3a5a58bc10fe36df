//! Alarms: who watches a disk is told when its requests take too long, and in which stage.
//!
//! - `spec` is what is written of one;
//! - `watch` is one being kept: it looks at what is counted anyway, each few seconds, and at the oldest
//!   request that is not answered yet.
//!
//! Disks without alarms are never looked at.

mod spec;
mod watch;

pub use spec::Alarm;
pub use watch::{AlarmInfo, Seen, Watches};
