//! What only KVM shows, on KVM hosts that are emulated, so that it works on any machine. Each host keeps one CPU of
//! the machine busy.

mod experiments;
mod slow_disk;
mod steal;
mod wiki;
