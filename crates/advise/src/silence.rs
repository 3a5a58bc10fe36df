//! Why no change helps.

use crate::evidence::{Evidence, Storage, Threads, Verdict};
use crate::rules::is_storage_bound;

/// Returns the reason why no change of the disk helps: one sentence without a full stop.
pub fn reason(evidence: &Evidence) -> String {
    let text = match evidence.verdict {
        Verdict::Idle => "the disk had no requests; repeat the command while the load runs",
        Verdict::Frozen => "the disk is frozen; resume it with `fathom disk thaw`",
        Verdict::Stuck => {
            "no request has completed; look at the storage and at the log of the server"
        }
        Verdict::Filter => {
            "a filter holds the requests back that is no throttle of this disk alone; see `fathom \
             show` and `fathom group list`"
        }
        Verdict::Thread => return busy(evidence).to_owned(),
        Verdict::Tables => {
            "the lookups do not wait for reads of tables, or the host has no memory for a larger \
             cache"
        }
        Verdict::Client => "the disk waits for its client, which keeps few requests in flight",
        Verdict::Unknown => "the limiter is unknown, and advice would be a guess",
        Verdict::Latency if is_storage_bound(evidence) => match evidence.storage {
            Storage::File => {
                "the requests spend their time in the block device; only a faster device, or more \
                 requests in flight, would help"
            }
            Storage::Server => {
                "the requests spend their time in the server of the storage and on the way to it"
            }
            Storage::Memory => "the storage is memory",
        },
        Verdict::Latency => "no part of a request's time can be shortened by an option",
    };
    text.to_owned()
}

fn busy(evidence: &Evidence) -> &'static str {
    match &evidence.threads {
        _ if !evidence.host.has_free_cpu() => {
            "the threads have work all the time, and the host has no free CPU"
        }
        Threads::Own(_) => {
            "the threads have work all the time, and each queue with requests has a thread already; \
             give the guest more queues"
        }
        Threads::Shared(_) => {
            "the pool's threads have work all the time, and most of it is this disk's; give the \
             pool more threads"
        }
    }
}
