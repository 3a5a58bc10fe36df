//! The rules, in rank order: the first that holds is the verdict.
//!
//! Where requests spend their time is stronger evidence than who is busy. Requests wait in front
//! of what limits them: if they are all in the device, or in a filter, no thread on the way can be
//! the limit, however busy it looks; and if a thread is, they are not in the device. So the two
//! rules about time come first and exclude each other.
//!
//! Then come causes before what they look like: a capped group's threads look saturated or wait
//! for a CPU; a vCPU without a CPU looks like a slow guest; the load's own thread makes its vCPU
//! busy. What only lengthens each request a little comes after what would stop more of them. Last
//! is latency, which holds when nothing else does.

mod cpu_cap;
mod device;
mod filter;
mod latency;
mod load;
mod lock;
mod pressure;
mod run_queue;
mod steal;
mod thread;

use crate::rule::Rule;

/// The rule of a control group's CPU limit, which can be lifted.
pub const CPU_CAP: &str = "cpu-cap";

/// One line a rule.
pub static RULES: &[Rule] = &[
    rule("device", device::at_its_limit),
    rule("filter", filter::holds_requests),
    rule(CPU_CAP, cpu_cap::throttled),
    rule("run-queue", run_queue::starved),
    rule("steal", steal::starved),
    rule("load-thread", load::saturated),
    rule("thread", thread::saturated),
    rule("lock", lock::waited_for),
    rule("run-queue", run_queue::delayed),
    rule("steal", steal::delayed),
    rule("pressure", pressure::high),
    rule("latency", latency::bound),
];

const fn rule(name: &'static str, find: crate::rule::Find) -> Rule {
    Rule { name, find }
}
