//! KVM's side: doorbells, interrupts, and the times at which each vCPU was in the guest.

use std::collections::{HashMap, VecDeque};

use fathom_run::{Disk, Event, Kind, Role, Run};

use super::doorbell::{Doorbell, Interrupt};
use super::requests::compatible;
use super::survey::Survey;
use super::window::Window;

/// The state of a vCPU's thread since its last exit.
#[derive(Debug, Default)]
struct VcpuThread {
    vcpu: Option<u32>,
    exit: Option<i64>,
    /// The doorbell of this exit.
    doorbell: Option<u64>,
}

/// The state of KVM's side.
#[derive(Debug)]
pub(crate) struct Kvm {
    doorbell_gpas: Vec<u64>,
    kick_eventfds: Vec<u64>,
    call_eventfds: Vec<u64>,
    /// Places in these two lists are no numbers of queues.
    queues_unknown: bool,
    msi: Vec<(u64, u64)>,
    /// The IO-APIC's pins to which the disk's legacy interrupts (INTx) are wired.
    gsis: Vec<u64>,
    /// Threads that serve the disk.
    servers: Vec<u32>,
    /// The threads of `servers` that take the disk's requests: the I/O threads, else the main
    /// loops.
    takers: Vec<u32>,
    /// vCPUs by thread; if empty, any thread may be a vCPU.
    vcpus: HashMap<u32, u32>,
    /// Whether doorbells can be assigned to vCPUs.
    pub(crate) by_vcpu: bool,
    only_disk: bool,
    threads: HashMap<u32, VcpuThread>,
    pub(crate) doorbells: Window<Doorbell>,
    pub(crate) fresh: Vec<u64>,
    pub(crate) interrupts: VecDeque<Interrupt>,
    /// Windows (entry, exit) in the guest, by vCPU.
    windows: HashMap<u32, VecDeque<(i64, Option<i64>)>>,
    /// The queue of the call that a thread signalled last, by thread.
    called: HashMap<u32, Option<u16>>,
    /// (thread, time) of vCPUs that resumed after they had slept.
    woken: VecDeque<(u32, i64)>,
    pub(crate) userspace: u64,
}

/// Returns the pins of a disk's legacy interrupts. A guest's Linux numbers the IO-APIC's
/// interrupts as KVM does, and all others from `KVM_IOAPIC_NUM_PINS` on.
pub(crate) fn pins(disk: &Disk) -> Vec<u64> {
    const PINS: u64 = 24;
    let irqs = disk.guest_irqs.iter().copied();
    irqs.filter(|&irq| irq < PINS).collect()
}

impl Kvm {
    pub(crate) fn new(run: &Run, survey: &Survey) -> Kvm {
        let none = Disk::default();
        let disk = run.disk().unwrap_or(&none);
        let vcpus: HashMap<u32, u32> = run
            .threads
            .iter()
            .filter(|thread| thread.role == Role::Vcpu)
            .filter_map(|thread| Some((thread.tid, thread.vcpu?)))
            .collect();
        let serves = |pid: u32| disk.server_pid.is_none_or(|server| server == pid);
        let servers = run.threads.iter().filter(|thread| {
            serves(thread.pid) && matches!(thread.role, Role::Io | Role::Main | Role::Pool)
        });
        let of = |role| {
            let own = servers.clone().filter(move |thread| thread.role == role);
            own.map(|thread| thread.tid).collect::<Vec<u32>>()
        };
        let mut takers = of(Role::Io);
        if takers.is_empty() {
            takers = of(Role::Main);
        }
        Kvm {
            doorbell_gpas: disk.doorbells.clone(),
            kick_eventfds: disk.kick_eventfds.clone(),
            call_eventfds: disk.call_eventfds.clone(),
            queues_unknown: disk.queues_unknown,
            msi: disk.msi.clone(),
            gsis: pins(disk),
            servers: servers.map(|thread| thread.tid).collect(),
            takers,
            by_vcpu: !vcpus.is_empty() || survey.host(Kind::KvmExit),
            vcpus,
            only_disk: run.disks.len() <= 1,
            threads: HashMap::new(),
            doorbells: Window::default(),
            fresh: Vec::new(),
            interrupts: VecDeque::new(),
            windows: HashMap::new(),
            called: HashMap::new(),
            woken: VecDeque::new(),
            userspace: 0,
        }
    }

    /// Returns whether this thread serves the disk; None if no serving thread is known.
    pub(crate) fn is_server(&self, tid: u32) -> Option<bool> {
        (!self.servers.is_empty()).then(|| self.servers.contains(&tid))
    }

    /// Returns the thread that took the interrupt's requests, if that thread sent the interrupt.
    /// QEMU's main loop raises pins of the IO-APIC for other threads too.
    pub(crate) fn taker(&self, sent: &Interrupt) -> Option<u32> {
        (sent.is_message && self.takers.contains(&sent.tid)).then_some(sent.tid)
    }

    pub(crate) fn event(&mut self, at: i64, event: &Event) {
        let (args, tid) = (&event.args, event.tid);
        match event.kind {
            Kind::KvmExit => self.exit(at, tid, args[3] as u32),
            Kind::KvmEntry => self.entry(at, tid, args[0] as u32),
            Kind::KvmMmio if args[0] == 2 => self.ring(at, tid, args[2], args[3], false),
            Kind::KvmFastMmio => self.ring(at, tid, args[0], u64::MAX, true),
            Kind::KvmPio if args[0] == 1 => self.ring(at, tid, args[1], args[4], false),
            Kind::KvmUserspaceExit => self.leave_to_userspace(tid),
            Kind::EventfdSignal => self.signal(at, tid, args[0]),
            Kind::KvmMsiSetIrq => self.message(at, tid, (args[0], args[1])),
            Kind::KvmSetIrq if args[1] == 1 && self.gsis.contains(&args[0]) => {
                self.interrupt(at, tid, None, false);
            }
            Kind::KvmVcpuWakeup => self.woken.push_back((tid, at)),
            Kind::KvmApicAcceptIrq => {
                if let Some(last) = self.interrupts.back_mut()
                    && last.tid == tid
                    && last.apic.is_none()
                {
                    last.apic = u32::try_from(args[0]).ok();
                }
            }
            _ => {}
        }
    }

    fn vcpu_of(&self, tid: u32, said: Option<u32>) -> Option<u32> {
        match self.vcpus.is_empty() {
            true => said,
            false => self.vcpus.get(&tid).copied(),
        }
    }

    /// Returns whether a thread is not a vCPU of this guest.
    fn is_stranger(&self, tid: u32) -> bool {
        !self.vcpus.is_empty() && !self.vcpus.contains_key(&tid)
    }

    fn exit(&mut self, at: i64, tid: u32, said: u32) {
        if self.is_stranger(tid) {
            return;
        }
        let vcpu = self.vcpu_of(tid, Some(said));
        let thread = VcpuThread {
            vcpu,
            exit: Some(at),
            doorbell: None,
        };
        self.threads.insert(tid, thread);
        let windows = vcpu.map(|vcpu| self.windows.entry(vcpu).or_default());
        if let Some((_, exit)) = windows.and_then(|windows| windows.back_mut())
            && exit.is_none()
        {
            *exit = Some(at);
        }
    }

    fn entry(&mut self, at: i64, tid: u32, said: u32) {
        if self.is_stranger(tid) {
            return;
        }
        if let Some(thread) = self.threads.get_mut(&tid) {
            thread.exit = None;
            thread.doorbell = None;
        }
        if let Some(vcpu) = self.vcpu_of(tid, Some(said)) {
            let windows = self.windows.entry(vcpu).or_default();
            match windows.back_mut() {
                // The previous entry was cancelled: the last entry counts.
                Some((entry, None)) => *entry = at,
                _ => windows.push_back((at, None)),
            }
        }
    }

    /// Returns the disk's queue for a doorbell's address, or None if the address is not the disk's.
    fn queue_of(&self, address: u64, value: u64) -> Option<u16> {
        let first = self.doorbell_gpas.iter().position(|&gpa| gpa == address)?;
        let shared = self.doorbell_gpas[first + 1..].contains(&address);
        let queue = if shared { value } else { first as u64 };
        let queues = self.doorbell_gpas.len() as u64;
        u16::try_from(queue).ok().filter(|_| queue < queues)
    }

    fn ring(&mut self, at: i64, tid: u32, address: u64, value: u64, late: bool) {
        if self.is_stranger(tid) {
            return;
        }
        let queue = self.queue_of(address, value);
        if queue.is_none() && !self.doorbell_gpas.is_empty() {
            return;
        }
        // Without known addresses, only the eventfd's signal identifies the doorbell.
        if queue.is_none() && self.kick_eventfds.is_empty() {
            return;
        }
        let open = self.open_doorbell(tid, |doorbell| doorbell.rung.is_none());
        if let Some(doorbell) = open {
            doorbell.rung = Some(at);
            doorbell.told_late |= late;
            doorbell.queue = queue.or(doorbell.queue);
            return;
        }
        if queue.is_some() {
            self.push(tid, queue, |doorbell| {
                doorbell.rung = Some(at);
                doorbell.told_late = late;
            });
        }
    }

    fn signal(&mut self, at: i64, tid: u32, id: u64) {
        let is_known = !self.queues_unknown;
        let queue_in = |ids: &[u64]| {
            let place = ids.iter().position(|&known| known == id)?;
            Some(u16::try_from(place).ok().filter(|_| is_known))
        };
        if let Some(queue) = queue_in(&self.call_eventfds) {
            self.called.insert(tid, queue);
        }
        let Some(queue) = queue_in(&self.kick_eventfds) else {
            return;
        };
        if self.is_stranger(tid) {
            return; // a server may signal its own kick eventfd
        }
        let open = self.open_doorbell(tid, |doorbell| doorbell.signalled.is_none());
        if let Some(doorbell) = open {
            doorbell.signalled = Some(at);
            return;
        }
        self.push(tid, queue, |doorbell| {
            doorbell.signalled = Some(at);
        });
    }

    /// Returns the doorbell of a thread's current exit, if `lacks` holds for it.
    fn open_doorbell(
        &mut self,
        tid: u32,
        lacks: impl Fn(&Doorbell) -> bool,
    ) -> Option<&mut Doorbell> {
        let id = self.threads.get(&tid)?.doorbell?;
        self.doorbells
            .get_mut(id)
            .filter(|doorbell| lacks(doorbell))
    }

    fn push(&mut self, tid: u32, queue: Option<u16>, fill: impl FnOnce(&mut Doorbell)) {
        let vcpu = self.vcpu_of(tid, None);
        let thread = self.threads.entry(tid).or_default();
        let mut doorbell = Doorbell {
            exit: thread.exit,
            rung: None,
            signalled: None,
            told_late: false,
            userspace: false,
            queue,
            vcpu: vcpu.or(thread.vcpu),
            linked: false,
        };
        fill(&mut doorbell);
        let id = self.doorbells.push(doorbell);
        thread.doorbell = Some(id);
        self.fresh.push(id);
    }

    fn leave_to_userspace(&mut self, tid: u32) {
        let open = self.open_doorbell(tid, |doorbell| !doorbell.userspace);
        if let Some(doorbell) = open {
            doorbell.userspace = true;
            self.userspace += 1;
        }
    }

    fn message(&mut self, at: i64, tid: u32, message: (u64, u64)) {
        let by_message = self.msi.iter().position(|&known| known == message);
        let by_call = self.called.remove(&tid);
        let served = self.is_server(tid);
        let queue = match (by_message, by_call) {
            (Some(queue), _) => u16::try_from(queue).ok(),
            (None, Some(queue)) => queue,
            // The guest may have moved its interrupt, but the sending thread still identifies the
            // disk.
            (None, None) if served == Some(true) && self.only_disk => None,
            (None, None) if served == Some(true) && self.msi.is_empty() => None,
            _ => return,
        };
        self.interrupt(at, tid, queue, true);
    }

    fn interrupt(&mut self, at: i64, tid: u32, queue: Option<u16>, is_message: bool) {
        self.interrupts.push_back(Interrupt {
            at,
            tid,
            queue,
            is_message,
            apic: None,
        });
    }

    /// Returns the last doorbell up to `kicked` and the first interrupt from `done` on.
    pub(crate) fn around(&self, kicked: Option<i64>, done: i64) -> (Option<i64>, Option<i64>) {
        let before = |doorbell: &&Doorbell| kicked.is_some_and(|kicked| doorbell.at() <= kicked);
        let mut doorbells = self.doorbells.iter().rev().map(|(_, doorbell)| doorbell);
        let exit = doorbells.find(before).map(Doorbell::at);
        (exit, self.interrupt_from(None, done).map(|irq| irq.at))
    }

    /// Returns the number of a queue's doorbells after `from` and up to `to`.
    pub(crate) fn doorbells_within(&self, queue: Option<u16>, from: i64, to: i64) -> usize {
        let doorbells = self.doorbells.iter().rev().map(|(_, doorbell)| doorbell);
        doorbells
            .take_while(|doorbell| doorbell.at() > from)
            .filter(|doorbell| doorbell.at() <= to && compatible(doorbell.queue, queue))
            .count()
    }

    /// Returns the time of the newest doorbell.
    pub(crate) fn newest_kick(&self) -> Option<i64> {
        self.doorbells.newest().map(|(_, doorbell)| doorbell.at())
    }

    /// Returns the guest's vCPU, if the guest has exactly one.
    pub(crate) fn only_vcpu(&self) -> Option<u32> {
        let mut vcpus = self.windows.keys();
        vcpus.next().copied().filter(|_| vcpus.next().is_none())
    }

    /// Returns the first interrupt of a queue at or after `from`.
    pub(crate) fn interrupt_from(&self, queue: Option<u16>, from: i64) -> Option<&Interrupt> {
        let start = self.interrupts.partition_point(|irq| irq.at < from);
        let mut rest = self.interrupts.range(start..);
        rest.find(|irq| compatible(irq.queue, queue))
    }

    /// Returns the last interrupt of a queue up to `to` and after `from`.
    pub(crate) fn interrupt_before(
        &self,
        queue: Option<u16>,
        from: i64,
        to: i64,
    ) -> Option<&Interrupt> {
        let end = self.interrupts.partition_point(|irq| irq.at <= to);
        let rest = self.interrupts.range(..end).rev();
        rest.take_while(|irq| irq.at > from)
            .find(|irq| compatible(irq.queue, queue))
    }

    /// Returns when a vCPU that was outside the guest at `at` entered it. Returns None if the vCPU
    /// was inside, and Err if that is unknown.
    pub(crate) fn entry_after(&self, vcpu: u32, at: i64) -> Result<Option<i64>, ()> {
        let windows = self.windows.get(&vcpu).ok_or(())?;
        let next = windows.partition_point(|&(entry, _)| entry <= at);
        let Some(&(_, exit)) = next.checked_sub(1).and_then(|i| windows.get(i)) else {
            return Err(());
        };
        if exit.is_none_or(|exit| exit > at) {
            return Ok(None);
        }
        windows.get(next).map(|&(entry, _)| Some(entry)).ok_or(())
    }

    /// Returns when a sleeping vCPU resumed between `from` and its entry at `to`. Returns None if
    /// it resumed several times, or if that is unknown.
    pub(crate) fn woken_between(&self, vcpu: u32, from: i64, to: i64) -> Option<i64> {
        let start = self.woken.partition_point(|&(_, at)| at < from);
        let own = |&&(tid, _): &&(u32, i64)| self.vcpu_of_thread(tid) == Some(vcpu);
        let mut within = self.woken.range(start..).take_while(|&&(_, at)| at <= to);
        let first = within.find(own)?;
        within.find(own).is_none().then_some(first.1)
    }

    fn vcpu_of_thread(&self, tid: u32) -> Option<u32> {
        self.vcpu_of(tid, self.threads.get(&tid)?.vcpu)
    }

    /// Returns whether a vCPU was in the guest at `at`, give or take `error`; None if unknown.
    pub(crate) fn was_inside(&self, vcpu: u32, at: i64, error: i64) -> Option<bool> {
        let windows = self.windows.get(&vcpu)?;
        let next = windows.partition_point(|&(entry, _)| entry <= at.saturating_add(error));
        let &(_, exit) = windows.get(next.checked_sub(1)?)?;
        Some(exit.is_none_or(|exit| exit >= at.saturating_sub(error)))
    }

    /// Drops events from before `at`.
    pub(crate) fn prune(&mut self, at: i64) {
        while self.interrupts.front().is_some_and(|irq| irq.at < at) {
            self.interrupts.pop_front();
        }
        while self.woken.front().is_some_and(|&(_, woken)| woken < at) {
            self.woken.pop_front();
        }
        while let Some((id, doorbell)) = self.doorbells.oldest()
            && doorbell.at() < at
        {
            self.doorbells.remove(id);
        }
        for windows in self.windows.values_mut() {
            while windows.len() > 1 && windows.get(1).is_some_and(|&(entry, _)| entry < at) {
                windows.pop_front();
            }
        }
    }
}
