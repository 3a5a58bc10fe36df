//! Tests each filter with real workers, above a disk in memory. The tests only compare times with
//! one another, with wide margins, because the machine may be busy.

#[path = "filters/delay.rs"]
mod delay;
#[path = "filters/drain.rs"]
mod drain;
#[path = "filters/fault.rs"]
mod fault;
#[path = "filters/lost.rs"]
mod lost;
#[path = "filters/others.rs"]
mod others;
#[path = "filters/readahead.rs"]
mod readahead;
mod support;
#[path = "filters/throttle.rs"]
mod throttle;
