//! Tests what only KVM shows, on emulated KVM hosts, so that the tests work on any machine.
//!
//! Each host keeps one CPU of the machine busy.

mod experiments;
mod slow_disk;
mod steal;
mod wiki;
