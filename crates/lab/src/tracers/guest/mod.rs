//! Traces the guest's kernel: from the block layer through virtio-blk to the doorbell, and back.

mod device;
mod record;

use std::fs;
use std::path::Path;

use fathom_run::{Kind, Stream};

use super::ftrace::{Mode, Recorder, Side, Source, unwritten};
use super::kvm::functions;
use super::{Collected, Tracefs, block};
use crate::error::{Error, Result};

pub(crate) use device::parse_dev;
pub use device::{GuestDisk, disks};
pub use record::{RecordOptions, record};

/// Name of the event file and of the collector in a round's list.
pub const NAME: &str = "guest";

/// A kernel function to trace.
struct Watched {
    name: &'static str,
    kind: Kind,
    /// Arguments in the syntax of kprobe_events, and the fields that the event uses.
    fetch: &'static str,
    args: &'static [Source],
    /// Whether every virtio-blk driver has the function. Some versions lack the others.
    required: bool,
}

const fn watched(
    name: &'static str,
    kind: Kind,
    fetch: &'static str,
    args: &'static [Source],
    required: bool,
) -> Watched {
    Watched {
        name,
        kind,
        fetch,
        args,
        required,
    }
}

const VQ: &[Source] = &[Source::Field("vq")];
const HCTX: &[Source] = &[Source::Field("hctx"), Source::Nothing];

/// Functions to trace. Arguments are in registers by the x86-64 ABI: di, si, ...
const FUNCTIONS: &[Watched] = &[
    watched(
        "virtio_queue_rq",
        Kind::VirtioQueueRq,
        "hctx=%di",
        HCTX,
        true,
    ),
    // Takes a list of requests; exists from Linux 5.17.
    watched(
        "virtio_queue_rqs",
        Kind::VirtioQueueRq,
        "",
        &[Source::Nothing, Source::Nothing],
        false,
    ),
    watched(
        "virtqueue_notify",
        Kind::VirtqueueNotify,
        "vq=%di",
        VQ,
        true,
    ),
    watched("vp_notify", Kind::VpNotify, "vq=%di", VQ, true),
    // With VIRTIO_F_NOTIFICATION_DATA, from Linux 6.4.
    watched("vp_notify_with_data", Kind::VpNotify, "vq=%di", VQ, false),
    watched("vm_notify", Kind::VpNotify, "vq=%di", VQ, false),
    watched(
        "vring_interrupt",
        Kind::VringInterrupt,
        "irq=%di:s32 vq=%si",
        &[Source::Field("irq"), Source::Field("vq")],
        true,
    ),
    watched("virtblk_done", Kind::VirtblkDone, "vq=%di", VQ, true),
];

/// Options of the recording.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    /// The guest's disk, such as `vda`. If `None`, every virtio disk is recorded; with more than
    /// one, none of them is identified.
    pub device: Option<&'a str>,
    /// When the kernel's buffers are read, and their size.
    pub mode: Mode,
}

/// A running recording of the guest's events.
#[derive(Debug)]
pub struct Guest {
    recorder: Recorder,
    disks: Vec<GuestDisk>,
    /// The reason why a required function is not traced, if one is not.
    untraced: Option<String>,
}

/// Starts to record.
///
/// # Errors
/// When there is no such disk, or the kernel does not support tracing.
pub fn start(tracefs: &Tracefs, options: &Options) -> Result<Guest> {
    let mut disks = disks();
    if let Some(name) = options.device {
        disks.retain(|disk| disk.name == name);
        if disks.is_empty() {
            return Err(Error::Missing {
                what: format!("a virtio disk named {name}"),
                hint: "`ls /sys/block` lists the disks; those of virtio are vda, vdb, ...",
            });
        }
    }
    if disks.is_empty() {
        return Err(Error::Missing {
            what: "a virtio disk".into(),
            hint: "record inside the guest whose disk is measured",
        });
    }
    let mut recorder = Recorder::new(tracefs, NAME, options.mode)?;
    let any = |field: &str, numbers: Vec<u64>| {
        let terms: Vec<_> = numbers.iter().map(|n| format!("{field} == {n}")).collect();
        terms.join(" || ")
    };
    let devs = any("dev", disks.iter().map(|disk| disk.dev).collect());
    for (event, kind, args) in &block::EVENTS[..3] {
        recorder.event(event, Some(&devs), *kind, args);
    }
    let irqs: Vec<u64> = disks.iter().flat_map(|disk| disk.irqs.clone()).collect();
    if !irqs.is_empty() {
        let (args, irqs) = ([Source::Field("irq")], any("irq", irqs));
        let event = "irq/irq_handler_entry";
        recorder.event(event, Some(&irqs), Kind::IrqHandlerEntry, &args);
    }
    let untraced = watch_functions(&mut recorder);
    if disks.len() > 1 {
        let names: Vec<&str> = disks.iter().map(|disk| disk.name.as_str()).collect();
        let names = names.join(", ");
        recorder.problem(format!("several disks ({names}): name one with --device"));
    }
    recorder.start()?;
    Ok(Guest {
        recorder,
        disks,
        untraced,
    })
}

/// Traces the functions: with probes and arguments if possible, with the function tracer otherwise.
/// Returns the reason if a required function cannot be traced.
fn watch_functions(recorder: &mut Recorder) -> Option<String> {
    let kallsyms = fs::read_to_string("/proc/kallsyms").unwrap_or_default();
    let wanted: Vec<&str> = FUNCTIONS.iter().map(|function| function.name).collect();
    let known = functions(&kallsyms, &wanted);
    let mut rest: Vec<(&str, Kind)> = Vec::new();
    let mut untraced = None;
    let mut rest_required = false;
    let mut why = "this kernel has no kprobes".to_owned();
    let has_kprobes = recorder.instance().tracefs().has_kprobes();
    for function in FUNCTIONS {
        if !known.contains(function.name) {
            if function.required {
                let problem = format!("the guest's kernel has no {}", function.name);
                recorder.problem(problem.clone());
                untraced = Some(problem);
            }
            continue;
        }
        if has_kprobes {
            let (kind, args) = (function.kind, function.args);
            match recorder.probe(function.name, function.fetch, kind, args) {
                Ok(()) => continue,
                Err(error) => why = error.to_string(),
            }
        }
        rest.push((function.name, function.kind));
        rest_required |= function.required;
    }
    if rest.is_empty() {
        return untraced;
    }
    let names: Vec<&str> = rest.iter().map(|&(name, _)| name).collect();
    let names = names.join(", ");
    match recorder.functions(&rest) {
        Ok(()) => recorder.problem(format!(
            "{names}: calls only, without their queue, by the function tracer ({why})"
        )),
        Err(error) => {
            let problem = format!("{names} cannot be traced: {why}; {error}");
            recorder.problem(problem.clone());
            untraced = rest_required.then_some(problem).or(untraced);
        }
    }
    untraced
}

impl Guest {
    /// Returns the recorded disks, without the virtqueues that only the recording reveals.
    pub fn disks(&self) -> &[GuestDisk] {
        &self.disks
    }

    /// Returns the reason if the recording will lack the guest's layers.
    pub fn untraced(&self) -> Option<&str> {
        self.untraced.as_deref()
    }

    /// Returns the name of the clock in use.
    pub fn clock(&self) -> &'static str {
        self.recorder.clock().name()
    }

    /// Stops recording.
    ///
    /// # Errors
    /// When the kernel rejects it.
    pub fn halt(&mut self) -> Result<()> {
        self.recorder.halt()
    }

    /// Writes the recorded events into the folder `round`. Returns the disks with the virtqueues
    /// that the events reveal.
    ///
    /// # Errors
    /// When the events cannot be read or written.
    pub fn stop(mut self, round: &Path) -> Result<(Collected, Vec<GuestDisk>)> {
        let collected = self.recorder.finish(round, Side::Guest)?;
        let path = round.join(format!("{NAME}.events"));
        device::learn_queues(Stream::open(&path).map_err(unwritten)?, &mut self.disks)?;
        Ok((collected, self.disks))
    }
}
