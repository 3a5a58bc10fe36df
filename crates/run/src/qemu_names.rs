//! The trace events in the KVM wiki's page of 2010, and their present equivalents.
//!
//! Many of the 23 events existed only in the author's branch; others have been renamed since. The
//! recorder needs the names in a QEMU version, and the report needs to know which wiki event each
//! name stands for.

/// Major and minor version of QEMU.
pub type Version = (u32, u32);

/// The present equivalent of an event of the wiki.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Successor {
    /// Any of these trace events of QEMU, depending on the device's configuration.
    Events(&'static [&'static str]),
    /// The entry of this system call, since there is no event.
    Enter(&'static str),
    /// The return of this system call, since there is no event.
    Exit(&'static str),
    /// No equivalent exists.
    None,
}

impl Successor {
    /// Describes the equivalent for users: `thread_pool_submit`, `io_submit()`, `none`.
    pub fn describe(self) -> String {
        match self {
            Successor::Events(names) => names.join(" or "),
            Successor::Enter(call) => format!("{call}()"),
            Successor::Exit(call) => format!("return of {call}()"),
            Successor::None => "none".to_owned(),
        }
    }
}

/// An event of the wiki.
#[derive(Clone, Copy, Debug)]
pub struct Alias {
    /// Name in the wiki.
    pub wiki: &'static str,
    /// Pairs of first version and successor, in ascending order. A version older than the first
    /// pair counts as the first.
    pub since: &'static [(Version, Successor)],
}

impl Alias {
    /// Returns the successor in a version.
    pub fn successor(&self, version: Version) -> Successor {
        let known = self.since.iter().rev().find(|(first, _)| *first <= version);
        known
            .or(self.since.first())
            .map_or(Successor::None, |(_, successor)| *successor)
    }
}

use Successor::{Enter, Events, Exit};

const fn alias(wiki: &'static str, since: &'static [(Version, Successor)]) -> Alias {
    Alias { wiki, since }
}

/// The events of the wiki, in its order.
pub const WIKI_EVENTS: &[Alias] = &[
    // Occurs only when a device is set up.
    alias("virtio_add_queue", &[]),
    alias(
        "virtio_queue_notify",
        &[((0, 0), Events(&["virtio_queue_notify"]))],
    ),
    alias("virtqueue_pop", &[((0, 0), Events(&["virtqueue_pop"]))]),
    alias(
        "virtio_notify",
        &[
            // An I/O thread raises its interrupts by irqfd, which used to have an event of its own.
            ((0, 0), Events(&["virtio_notify_irqfd", "virtio_notify"])),
            ((10, 1), Events(&["virtio_notify"])),
        ],
    ),
    alias(
        "virtio_blk_rw_complete",
        &[((0, 0), Events(&["virtio_blk_rw_complete"]))],
    ),
    alias(
        "paio_submit",
        &[
            ((0, 0), Events(&["thread_pool_submit"])),
            ((10, 0), Events(&["thread_pool_submit_aio"])),
        ],
    ),
    alias(
        "posix_aio_process_queue",
        &[
            ((0, 0), Events(&["thread_pool_complete"])),
            ((10, 0), Events(&["thread_pool_complete_aio"])),
        ],
    ),
    alias("posix_aio_read", &[((0, 0), Exit("ppoll"))]),
    // Today the completions are read from the ring that is shared with the kernel.
    alias("qemu_laio_enqueue_completed", &[]),
    alias("qemu_laio_completion_cb", &[((0, 0), Enter("read"))]),
    alias("laio_submit", &[((0, 0), Enter("io_submit"))]),
    alias("laio_submit_done", &[((0, 0), Exit("io_submit"))]),
    alias("main_loop_wait_entry", &[]),
    alias("main_loop_wait_exit", &[]),
    alias("main_loop_wait_pre_select", &[((0, 0), Enter("ppoll"))]),
    alias("main_loop_wait_post_select", &[((0, 0), Exit("ppoll"))]),
    alias("main_loop_wait_iohandlers_done", &[]),
    alias("main_loop_wait_timers_done", &[]),
    // The interrupt is a write to the irqfd.
    alias("kvm_set_irq_level", &[((0, 0), Enter("write"))]),
    alias("kvm_set_irq_level_done", &[((0, 0), Exit("write"))]),
    alias("pre_kvm_run", &[((0, 0), Events(&["kvm_vcpu_ioctl"]))]),
    alias("post_kvm_run", &[((0, 0), Events(&["kvm_run_exit"]))]),
    alias("kvm_run_exit_io_done", &[]),
];

/// Events of io_uring, which is newer than the wiki, in place of `paio_submit` and
/// `posix_aio_process_queue`.
pub const IO_URING_EVENTS: &[Alias] = &[
    alias("paio_submit", &[((0, 0), Events(&["luring_co_submit"]))]),
    alias(
        "posix_aio_process_queue",
        &[
            ((0, 0), Events(&["luring_process_completion"])),
            ((10, 2), Events(&["luring_cqe_handler"])),
        ],
    ),
];

/// Returns the alias of an event of the wiki.
pub fn wiki_event(name: &str) -> Option<&'static Alias> {
    WIKI_EVENTS.iter().find(|alias| alias.wiki == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_the_wikis_events_are_there_once() {
        assert_eq!(WIKI_EVENTS.len(), 23);
        for alias in WIKI_EVENTS {
            assert_eq!(wiki_event(alias.wiki).unwrap().wiki, alias.wiki);
            assert!(alias.since.is_sorted_by_key(|(first, _)| *first));
        }
    }

    #[test]
    fn names_are_those_of_the_version() {
        let of = |name, version| wiki_event(name).unwrap().successor(version).describe();
        assert_eq!(of("paio_submit", (7, 2)), "thread_pool_submit");
        assert_eq!(of("paio_submit", (9, 2)), "thread_pool_submit");
        assert_eq!(of("paio_submit", (10, 0)), "thread_pool_submit_aio");
        let both = "virtio_notify_irqfd or virtio_notify";
        assert_eq!(of("virtio_notify", (8, 2)), both);
        assert_eq!(of("virtio_notify", (10, 1)), "virtio_notify");
        assert_eq!(of("laio_submit", (10, 0)), "io_submit()");
        assert_eq!(of("laio_submit_done", (7, 2)), "return of io_submit()");
        assert_eq!(of("main_loop_wait_entry", (10, 0)), "none");
    }
}
