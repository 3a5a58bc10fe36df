//! Traces KVM on the host: how a kick leaves the guest, and how an interrupt is injected.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use fathom_run::{Kind, Pair};

use super::ftrace::{Mode, Recorder, Side, Source};
use super::scene::Scene;
use super::{Collected, Collector, Tracefs, boxed, btf};
use crate::error::{Error, Result};
use crate::host::Accelerator;

/// Name of the event file and of the collector in a round's list.
pub const NAME: &str = "kvm";

/// Events that every KVM has since Linux 5.10, with their fields.
pub(super) const EVENTS: &[(&str, Kind, &[Source])] = {
    use Source::{Field, Optional};
    &[
        (
            "kvm/kvm_exit",
            Kind::KvmExit,
            &[
                Field("exit_reason"),
                Field("isa"),
                Field("guest_rip"),
                Optional("vcpu_id"),
            ],
        ),
        (
            "kvm/kvm_entry",
            Kind::KvmEntry,
            &[Field("vcpu_id"), Optional("rip")],
        ),
        (
            "kvm/kvm_mmio",
            Kind::KvmMmio,
            &[Field("type"), Field("len"), Field("gpa"), Field("val")],
        ),
        (
            "kvm/kvm_pio",
            Kind::KvmPio,
            &[
                Field("rw"),
                Field("port"),
                Field("size"),
                Field("count"),
                Optional("val"),
            ],
        ),
        (
            "kvm/kvm_userspace_exit",
            Kind::KvmUserspaceExit,
            &[Field("reason"), Field("errno")],
        ),
        (
            "kvm/kvm_msi_set_irq",
            Kind::KvmMsiSetIrq,
            &[Field("address"), Field("data")],
        ),
        (
            "kvm/kvm_apic_accept_irq",
            Kind::KvmApicAcceptIrq,
            &[Field("apicid"), Field("dm"), Field("tm"), Field("vec")],
        ),
        (
            "kvm/kvm_set_irq",
            Kind::KvmSetIrq,
            &[Field("gsi"), Field("level"), Field("irq_source_id")],
        ),
        (
            "kvm/kvm_vcpu_wakeup",
            Kind::KvmVcpuWakeup,
            &[Field("ns"), Field("waited"), Optional("valid")],
        ),
        (
            "kvm/kvm_write_tsc_offset",
            Kind::KvmWriteTscOffset,
            &[
                Field("vcpu_id"),
                Field("previous_tsc_offset"),
                Field("next_tsc_offset"),
            ],
        ),
    ]
};

/// Functions that signal an eventfd. From Linux 6.8, the first is inline and calls the second.
const SIGNALS: &[&str] = &["eventfd_signal", "eventfd_signal_mask"];

/// Options of the recording.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    /// Threads of QEMU and of the disk's server. Threads that these start later count too.
    /// Interrupts are sent by the server's threads.
    pub threads: &'a [u32],
    /// When the kernel's buffers are read, and their size.
    pub mode: Mode,
}

/// A running recording of KVM's events.
#[derive(Debug)]
pub struct Kvm {
    recorder: Recorder,
}

/// Records the KVM events of the scene's QEMU and disk server.
pub(super) fn in_scene(scene: &Scene) -> Option<Result<Box<dyn Collector>>> {
    if scene.accelerator != Accelerator::Kvm.name() {
        let what = format!(
            "QEMU runs with accel={}; its kicks and interrupts do not pass KVM, and are not traced",
            scene.accelerator
        );
        return Some(Err(Error::Protocol(what)));
    }
    let options = Options {
        threads: scene.threads,
        mode: scene.mode,
    };
    Some(boxed(start(scene.tracefs, &options)))
}

/// Starts to record.
///
/// # Errors
/// When KVM is not loaded or the kernel does not support tracing.
pub fn start(tracefs: &Tracefs, options: &Options) -> Result<Kvm> {
    if !tracefs.has_event("kvm/kvm_exit") {
        return Err(Error::Missing {
            what: "KVM's trace events".into(),
            hint: "load KVM: modprobe kvm_intel (or kvm_amd)",
        });
    }
    let mut recorder = Recorder::new(tracefs, NAME, options.mode)?;
    recorder.instance().only_threads(options.threads)?;
    for (event, kind, args) in EVENTS {
        recorder.event(event, None, *kind, args);
    }
    let gpa = [Source::Field("gpa")];
    recorder.optional("kvm/kvm_fast_mmio", None, Kind::KvmFastMmio, &gpa);
    if let Err(reason) = probe_signals(&mut recorder) {
        recorder.problem(format!(
            "no eventfd of a kick or interrupt is known ({reason}); devices are distinguished \
             only by their addresses"
        ));
    }
    recorder.start()?;
    Ok(Kvm { recorder })
}

/// Records the id of each signalled eventfd, which is the id in /proc/PID/fdinfo.
fn probe_signals(recorder: &mut Recorder) -> std::result::Result<(), String> {
    if !recorder.instance().tracefs().has_kprobes() {
        return Err("this kernel has no kprobes".into());
    }
    let offset = btf::member_offset("eventfd_ctx", "id")
        .ok_or("this kernel has no type information (/sys/kernel/btf/vmlinux)")?;
    let kallsyms = fs::read_to_string("/proc/kallsyms").unwrap_or_default();
    let known = functions(&kallsyms, SIGNALS);
    let function = SIGNALS
        .iter()
        .find(|&&name| known.contains(name))
        .ok_or("the kernel has no eventfd_signal")?;
    let fetch = format!("id=+{offset}(%di):s32");
    let args = [Source::Field("id")];
    let probed = recorder.probe(function, &fetch, Kind::EventfdSignal, &args);
    probed.map_err(|error| error.to_string())
}

/// Returns the wanted functions that the text of /proc/kallsyms contains. The text has more than
/// 100,000 lines, so one pass searches for all functions.
pub(super) fn functions<'a>(kallsyms: &'a str, wanted: &[&str]) -> HashSet<&'a str> {
    let function = |line: &'a str| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let is_code = matches!(fields.next(), Some("t" | "T"));
        fields
            .next()
            .filter(|name| is_code && wanted.contains(name))
    };
    kallsyms.lines().filter_map(function).collect()
}

impl Collector for Kvm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn halt(&mut self) -> Result<()> {
        self.recorder.halt()
    }

    fn keep(&mut self, since: Pair, until: Pair) {
        self.recorder.keep(since, until);
    }

    fn stop(self: Box<Self>, round: &Path) -> Result<Collected> {
        self.recorder.finish(round, Side::Host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_code_of_the_kernel_and_of_modules() {
        let text = "ffffffff81000000 T eventfd_signal\n\
                    ffffffff82000000 D vp_data\n\
                    ffffffffc0000000 t vp_notify\t[virtio_pci]\n\
                    ffffffff\n";
        let wanted = ["vp_notify", "vp_data", "vm_notify"];
        assert_eq!(functions(text, &wanted), HashSet::from(["vp_notify"]));
        let wanted = ["eventfd_signal", "vp_notify"];
        assert_eq!(functions(text, &wanted), HashSet::from(wanted));
    }
}
