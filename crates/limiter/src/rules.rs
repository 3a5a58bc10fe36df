//! The rules, in rank order: the first one that holds is the verdict.
//!
//! Where requests spend their time is stronger evidence than which thread is busy, because requests
//! queue in front of their limit. If all requests are in the device or in a filter, no thread on
//! the path is the limit, however busy it looks. If a thread is the limit, the requests are not in
//! the device. Therefore the two rules about time come first; they exclude each other.
//!
//! Causes come before their symptoms. Threads of a capped group look saturated or wait for a CPU; a
//! vCPU without a CPU looks like a slow guest; the load's own thread makes its vCPU busy. Rules for
//! what only lengthens each request a little come after rules for what blocks further requests, and
//! hold only for the largest part of a request's time. Latency is last, since it holds when nothing
//! else does and it was seen where the time goes.

pub mod cpu_cap;
pub mod device;
pub mod filter;
pub mod io_cap;
pub mod latency;
pub mod load;
pub mod lock;
pub mod neighbour;
pub mod pressure;
pub mod run_queue;
pub mod steal;
pub mod tables;
pub mod thread;

use crate::rule::Rule;

/// Name of the rule for a control group's CPU limit, which the user can raise.
pub const CPU_CAP: &str = "cpu-cap";
/// Name of the rule for a control group's I/O limit, which the user can raise.
pub const IO_CAP: &str = "io-cap";

/// The rules, one per line.
pub static RULES: &[Rule] = &[
    rule("device", device::at_its_limit),
    rule("filter", filter::holds_requests),
    rule(IO_CAP, io_cap::used),
    rule(CPU_CAP, cpu_cap::throttled),
    rule("run-queue", run_queue::starved),
    rule("steal", steal::starved),
    rule("load-thread", load::saturated),
    rule("thread", thread::saturated),
    rule("lock", lock::waited_for),
    rule("run-queue", run_queue::delayed),
    rule("steal", steal::delayed),
    rule("neighbour", neighbour::uses_device),
    rule("pressure", pressure::high),
    rule("tables", tables::missed),
    rule("client", load::pace),
    rule("latency", latency::bound),
];

const fn rule(name: &'static str, find: crate::rule::Find) -> Rule {
    Rule { name, find }
}
