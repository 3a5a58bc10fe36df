//! What goes between a guest and a disk's server by KVM: doorbells one way, interrupts the other.

/// A doorbell of the disk that a vCPU wrote.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Doorbell {
    /// The vCPU had left the guest.
    pub(crate) exit: Option<i64>,
    /// KVM's event of the doorbell.
    pub(crate) rung: Option<i64>,
    /// The eventfd was signalled.
    pub(super) signalled: Option<i64>,
    /// KVM tells of the doorbell only after the signal (kvm_fast_mmio).
    pub(super) told_late: bool,
    /// No ioeventfd took it: user space did.
    pub(crate) userspace: bool,
    pub(crate) queue: Option<u16>,
    pub(crate) vcpu: Option<u32>,
    /// A kick of the guest's was found for it.
    pub(crate) linked: bool,
}

impl Doorbell {
    /// The first that was seen of it.
    pub(crate) fn at(&self) -> i64 {
        self.exit.or(self.rung).or(self.signalled).unwrap_or(0)
    }

    /// When KVM signalled the eventfd; None where user space did.
    pub(crate) fn signal(&self) -> Option<i64> {
        if self.userspace {
            return None;
        }
        self.signalled.or(self.rung)
    }

    /// The signal's own event was seen.
    pub(crate) fn is_signalled(&self) -> bool {
        self.signalled.is_some()
    }

    /// The signal may have been a little before the time that is known.
    pub(crate) fn is_told_late(&self) -> bool {
        self.told_late && self.signalled.is_none()
    }
}

/// An interrupt that KVM sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interrupt {
    pub(crate) at: i64,
    pub(crate) tid: u32,
    pub(crate) queue: Option<u16>,
    /// A message (MSI), not a pin of the IO-APIC.
    pub(crate) is_message: bool,
    /// The local APIC that took it.
    pub(crate) apic: Option<u32>,
}
