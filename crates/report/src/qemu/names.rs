//! Maps the names of QEMU's events to steps, for all versions of QEMU.

use fathom_run::Event;
use fathom_run::qemu_names::{IO_URING_EVENTS, Successor, Version, wiki_event};

/// A row that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Row {
    Kick,
    Submit,
    Complete,
    RwComplete,
    Interrupt,
}

impl Row {
    pub const COUNT: usize = 5;
}

/// The meaning of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// `virtio_queue_notify`; the device is the first argument.
    Kick,
    /// `virtio_blk_handle_*`; the arguments are device, request.
    Taken,
    Submit,
    Complete,
    /// The arguments are device, request.
    RwComplete,
    /// The device is the first argument.
    Interrupt,
}

/// The I/O engine of the traced QEMU, as its events show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Threads,
    /// Linux AIO, which has no events.
    Native,
    IoUring,
    /// io_uring in QEMU from 10.2.
    NewIoUring,
}

#[derive(Clone, Debug)]
pub(super) struct Names {
    /// The meaning of each string, by the string's number.
    what: Vec<Option<What>>,
    strings: Vec<String>,
    engine: Engine,
}

impl Names {
    pub fn of(strings: &[String]) -> Names {
        let has = |prefix: &str| strings.iter().any(|name| name.starts_with(prefix));
        let engine = if has("luring_cqe_handler") {
            Engine::NewIoUring
        } else if has("luring_") {
            Engine::IoUring
        } else if has("thread_pool_") {
            Engine::Threads
        } else {
            Engine::Native
        };
        Names {
            what: strings.iter().map(|name| meaning(name)).collect(),
            strings: strings.to_vec(),
            engine,
        }
    }

    #[inline]
    pub fn what(&self, name: u64) -> Option<What> {
        *self.what.get(usize::try_from(name).ok()?)?
    }

    /// Returns the engine's identifier of a submitted request: `thread_pool_submit(pool, req,
    /// opaque)`, `luring_co_submit(bs, s, luringcb, ...)`, and `luring_co_submit(bs, req, ...)`
    /// since 10.2.
    pub fn submitted(&self, event: &Event) -> u64 {
        match self.engine {
            Engine::IoUring => event.args[3],
            _ => event.args[2],
        }
    }

    /// Returns the engine's identifier of a completed request: `thread_pool_complete(pool, req,
    /// ...)`, `luring_process_completion(s, luringcb, ret)`, `luring_cqe_handler(req, ret)`.
    pub fn completed(&self, event: &Event) -> u64 {
        match self.engine {
            Engine::NewIoUring => event.args[1],
            _ => event.args[2],
        }
    }

    /// Returns the wiki's rows: (what is measured, the wiki's name, today's name).
    pub fn rows(&self, version: Option<Version>) -> Vec<(Option<Row>, &'static str, String)> {
        const KICK: (Option<Row>, &str) = (Some(Row::Kick), "virtio_queue_notify");
        const RW: (Option<Row>, &str) = (Some(Row::RwComplete), "virtio_blk_rw_complete");
        const IRQ: (Option<Row>, &str) = (Some(Row::Interrupt), "virtio_notify");
        const SUBMIT: (Option<Row>, &str) = (Some(Row::Submit), "paio_submit");
        const COMPLETE: (Option<Row>, &str) = (Some(Row::Complete), "posix_aio_process_queue");
        let rows: &[(Option<Row>, &'static str)] = match self.engine {
            Engine::Threads => &[KICK, SUBMIT, (None, "posix_aio_read"), COMPLETE, RW, IRQ],
            Engine::IoUring | Engine::NewIoUring => &[KICK, SUBMIT, COMPLETE, RW, IRQ],
            Engine::Native => &[
                KICK,
                (None, "laio_submit"),
                (None, "qemu_laio_completion_cb"),
                (None, "qemu_laio_enqueue_completed"),
                RW,
                IRQ,
            ],
        };
        let today = |wiki| self.today(wiki, version);
        rows.iter()
            .map(|&(row, wiki)| (row, wiki, today(wiki)))
            .collect()
    }

    /// Returns today's name of an event: the name in the stream, else the name in this version.
    fn today(&self, wiki: &str, version: Option<Version>) -> String {
        let ring = matches!(self.engine, Engine::IoUring | Engine::NewIoUring);
        let in_ring = || IO_URING_EVENTS.iter().find(|alias| alias.wiki == wiki);
        let alias = in_ring().filter(|_| ring).or_else(|| wiki_event(wiki));
        let Some(alias) = alias else {
            return Successor::None.describe();
        };
        let names = alias
            .since
            .iter()
            .filter_map(|(_, successor)| match successor {
                Successor::Events(names) => Some(*names),
                _ => None,
            });
        let seen = |name: &&str| self.strings.iter().any(|string| string == name);
        if let Some(name) = names.flatten().copied().find(seen) {
            return name.to_owned();
        }
        alias.successor(version.unwrap_or((u32::MAX, 0))).describe()
    }
}

fn meaning(name: &str) -> Option<What> {
    Some(match name {
        "virtio_queue_notify" => What::Kick,
        "virtio_blk_handle_read" | "virtio_blk_handle_write" => What::Taken,
        "thread_pool_submit" | "thread_pool_submit_aio" | "luring_co_submit" => What::Submit,
        "thread_pool_complete" | "thread_pool_complete_aio" => What::Complete,
        "luring_process_completion" | "luring_cqe_handler" => What::Complete,
        "virtio_blk_rw_complete" => What::RwComplete,
        // An I/O thread defers the write to the irqfd to the end of a batch. The write has its own
        // event, which the wiki's row does not need.
        "virtio_notify" | "virtio_notify_irqfd" => What::Interrupt,
        _ => return None,
    })
}
