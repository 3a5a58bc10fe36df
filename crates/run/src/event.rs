//! Events from all sources.

/// Maximum number of arguments of an event.
pub const MAX_ARGS: usize = 10;

/// An event. Each [`Kind`] documents its `args`; unused ones are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Time in ticks of the file's clock.
    pub time: u64,
    /// Kind of the event, which gives `args` their meaning.
    pub kind: Kind,
    /// The CPU of the event; 0 if the source does not report it.
    pub cpu: u16,
    /// The running thread; 0 if the source does not report it.
    pub tid: u32,
    /// Arguments in the order of [`Kind::args`].
    pub args: [u64; MAX_ARGS],
}

impl Event {
    /// Creates an event with its first arguments.
    ///
    /// # Panics
    /// Panics if there are more than [`MAX_ARGS`] arguments.
    pub fn new(time: u64, kind: Kind, cpu: u16, tid: u32, args: &[u64]) -> Event {
        let mut all = [0; MAX_ARGS];
        all[..args.len()].copy_from_slice(args);
        Event {
            time,
            kind,
            cpu,
            tid,
            args: all,
        }
    }
}

/// Bits of the `flags` argument of block events and of [`Kind::FathomRequest`].
pub mod flags {
    /// The request writes data.
    pub const WRITE: u64 = 1 << 0;
    /// The request flushes the write cache. Fathom's block-status requests have this flag, too.
    pub const FLUSH: u64 = 1 << 1;
    /// The request discards blocks, or writes zeroes if [`WRITE`] is also set.
    pub const DISCARD: u64 = 1 << 2;
    /// The request is synchronous (REQ_SYNC).
    pub const SYNC: u64 = 1 << 3;
    /// The request transfers metadata of a file system (REQ_META).
    pub const METADATA: u64 = 1 << 4;
    /// The request is read-ahead (REQ_RAHEAD).
    pub const READAHEAD: u64 = 1 << 5;
    /// The written data must be on stable storage at completion (REQ_FUA).
    pub const FUA: u64 = 1 << 6;
    /// A Fathom request was found by polling, not by a kick.
    pub const POLLED: u64 = 1 << 16;
    /// The request came from another host with its cookie.
    pub const CAME: u64 = 1 << 17;
    /// The request was forwarded to another host with its cookie.
    pub const WENT: u64 = 1 << 18;
    /// The request was forwarded as several commands, none of which covers it completely.
    pub const SEVERAL: u64 = 1 << 19;
}

macro_rules! kinds {
    ($($(#[doc = $doc:literal])* $name:ident = $text:literal ($($arg:literal),*);)+) => {
        /// Kind of an event. In files, a kind has the source's own name if there is one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u16)]
        pub enum Kind { $($(#[doc = $doc])* $name,)+ }

        impl Kind {
            /// All kinds, in the order of their declaration.
            pub const ALL: &'static [Kind] = &[$(Kind::$name,)+];

            /// Returns the name in files and reports.
            pub fn name(self) -> &'static str {
                match self { $(Kind::$name => $text,)+ }
            }

            /// Returns the names of the arguments, in order.
            pub fn args(self) -> &'static [&'static str] {
                match self { $(Kind::$name => &[$($arg,)*],)+ }
            }

            /// Returns the kind with this name.
            pub fn from_name(name: &str) -> Option<Kind> {
                match name { $($text => Some(Kind::$name),)+ _ => None }
            }
        }
    };
}

kinds! {
    /// Events of this source were dropped before this event: `count`, or 0 if the number is not
    /// known.
    Lost = "lost" ("count");

    /// An operation of the benchmark (guest or host), at its start. `end` is on the same clock,
    /// `offset` and `length` are in bytes, and `result` is the return value of the system call
    /// (negative: errno).
    BenchOperation = "bench_operation" ("end", "offset", "length", "result", "flags");

    /// A bio enters the block layer. `dev` is the kernel's dev_t (major << 20 | minor). `sector`
    /// and `sectors` are in units of 512 bytes.
    BlockBioQueue = "block_bio_queue" ("dev", "sector", "sectors", "flags");
    /// A request is issued to the driver.
    BlockRqIssue = "block_rq_issue" ("dev", "sector", "sectors", "flags");
    /// A request completes; `error` is an errno or 0.
    BlockRqComplete = "block_rq_complete" ("dev", "sector", "sectors", "flags", "error");
    /// A bio or request was split at `sector`.
    BlockSplit = "block_split" ("dev", "sector", "new_sector");
    /// A bio was merged into a waiting request.
    BlockMerge = "block_bio_merge" ("dev", "sector", "sectors", "flags");
    /// The driver takes a request (or, with `virtio_queue_rqs`, a list of them). `hctx` is the
    /// kernel's address of the hardware queue; `count` is 0 if the probe does not report it.
    VirtioQueueRq = "virtio_queue_rq" ("hctx", "count");
    /// The driver decides whether to kick; `vq` is the kernel's address of the virtqueue.
    VirtqueueNotify = "virtqueue_notify" ("vq");
    /// The driver kicks.
    VpNotify = "vp_notify" ("vq");
    /// The queue's interrupt; `vq` is 0 if the probe does not report it.
    VringInterrupt = "vring_interrupt" ("irq", "vq");
    /// The driver's handler of completed requests.
    VirtblkDone = "virtblk_done" ("vq");
    /// Any interrupt handler.
    IrqHandlerEntry = "irq_handler_entry" ("irq");

    /// The vCPU left the guest; `reason` is the CPU's exit reason, and `isa` is 1 for VMX and 2 for
    /// SVM.
    KvmExit = "kvm_exit" ("reason", "isa", "rip", "vcpu");
    /// The vCPU is about to enter the guest.
    KvmEntry = "kvm_entry" ("vcpu", "rip");
    /// `type` 0 unsatisfied read, 1 read, 2 write.
    KvmMmio = "kvm_mmio" ("type", "len", "gpa", "value");
    /// The guest wrote to an address whose ioeventfd ignores the value.
    KvmFastMmio = "kvm_fast_mmio" ("gpa");
    /// `rw` 0 in, 1 out.
    KvmPio = "kvm_pio" ("rw", "port", "size", "count", "value");
    /// The exit is forwarded to user space, since no ioeventfd handled it.
    KvmUserspaceExit = "kvm_userspace_exit" ("reason", "errno");
    /// KVM delivers an MSI message; its address and data identify the queue.
    KvmMsiSetIrq = "kvm_msi_set_irq" ("address", "data");
    /// The APIC of a vCPU accepts an interrupt.
    KvmApicAcceptIrq = "kvm_apic_accept_irq" ("apicid", "delivery_mode", "trigger", "vector");
    /// The level of the interrupt line `gsi` changes; `source` is the id of KVM's interrupt source.
    KvmSetIrq = "kvm_set_irq" ("gsi", "level", "source");
    /// A halted vCPU resumes after `ns`. `waited` is 1 if its thread slept and 0 if KVM polled.
    KvmVcpuWakeup = "kvm_vcpu_wakeup" ("ns", "waited", "valid");
    /// The offset of a vCPU's TSC was changed.
    KvmWriteTscOffset = "kvm_write_tsc_offset" ("vcpu", "previous", "next");
    /// `id` is the eventfd-id of /proc/PID/fdinfo.
    EventfdSignal = "eventfd_signal" ("id");

    /// The CPU switches from one thread to another; `prev_state` is the first one's state.
    SchedSwitch = "sched_switch" ("prev_tid", "prev_state", "next_tid");
    /// The kernel wakes the thread `tid`, which will run on the CPU `target_cpu`.
    SchedWakeup = "sched_wakeup" ("tid", "target_cpu");
    /// `nr` is the number of the system call on x86-64; its first arguments follow.
    SysEnter = "sys_enter" ("nr", "arg0", "arg1", "arg2", "arg3");
    /// `result` as a two's complement i64.
    SysExit = "sys_exit" ("nr", "result");

    /// A request of `fathom serve`, at the time when its kick was seen. The six times that follow
    /// are the starts of the next stages and the end of the last stage. `offset` and `length` are
    /// in bytes. `rest` is queue (bits 0 to 15), flags (16 to 47) and errno (48 to 63). `cookie` is
    /// NBD's cookie if a flag is set for it. The thread is the worker if it is known.
    FathomRequest = "fathom_request"
        ("queue_at", "map_at", "device_at", "finish_at", "notify_at", "end", "offset", "length",
         "rest", "cookie");

    /// An event of QEMU's own. `name` is an index into the file's strings. The arguments are the
    /// numeric ones of QEMU's trace-events file, in its order, as many as fit. The `qemu_mutex_*`
    /// events have three: the mutex's address, the line, and the source file as an index into the
    /// file's strings.
    Qemu = "qemu" ("name", "arg0", "arg1", "arg2", "arg3", "arg4", "arg5");

    /// A symbol at an address of a process, recorded while the process ran. `name` is an index into
    /// the file's strings. All symbols have time 0.
    Symbol = "symbol" ("pid", "address", "name");

    /// An injected delay ended; `place` is an index into the file's strings.
    Injected = "injected" ("place", "ticks", "number");
}

impl Event {
    /// Unpacks the `rest` argument of a [`Kind::FathomRequest`]: queue, flags, errno.
    pub fn fathom_rest(&self) -> (u16, u64, u16) {
        let rest = self.args[8];
        (rest as u16, rest >> 16 & 0xffff_ffff, (rest >> 48) as u16)
    }

    /// Packs the values that [`fathom_rest`](Self::fathom_rest) returns; `flags` must fit into 32
    /// bits.
    pub fn pack_fathom_rest(queue: u16, flags: u64, errno: u16) -> u64 {
        u64::from(queue) | (flags & 0xffff_ffff) << 16 | u64::from(errno) << 48
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_found_by_its_name_and_fits() {
        for &kind in Kind::ALL {
            assert_eq!(Kind::from_name(kind.name()), Some(kind));
            assert!(kind.args().len() <= MAX_ARGS, "{}", kind.name());
        }
    }

    #[test]
    fn the_rest_of_a_fathom_request_is_packed_whole() {
        let rest = Event::pack_fathom_rest(513, flags::POLLED | flags::WRITE, 28);
        let mut event = Event::new(0, Kind::FathomRequest, 0, 0, &[]);
        event.args[8] = rest;
        assert_eq!(event.fathom_rest(), (513, flags::POLLED | flags::WRITE, 28));
    }
}
