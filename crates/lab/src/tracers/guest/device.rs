//! Virtio disks of this machine: their device numbers, interrupts and virtqueues.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use fathom_run::{Disk, Event, Kind, Stream};

use super::unwritten;
use crate::error::Result;

/// A virtio disk, as this kernel sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestDisk {
    /// Name of the block device, such as `vda`.
    pub name: String,
    /// dev_t: major << 20 | minor.
    pub dev: u64,
    /// Name of the virtio device, such as `virtio3`.
    pub virtio: String,
    /// Serial number, which is empty if the host has not assigned one.
    pub serial: String,
    /// Interrupts by queue, or one interrupt if all queues share it.
    pub irqs: Vec<u64>,
    /// Kernel addresses of the virtqueues, sorted by queue if each has its own interrupt. With a
    /// shared interrupt they are in order of appearance or, if another device shares it, by
    /// address.
    pub vqs: Vec<u64>,
    /// Whether the interrupt line may be shared with other devices.
    pub shares_irq: bool,
}

impl GuestDisk {
    /// Converts to the disk of a run directory.
    pub fn to_disk(&self, under_test: bool) -> Disk {
        Disk {
            name: self.name.clone(),
            under_test,
            device: "virtio-blk".into(),
            guest_dev: Some(self.dev),
            guest_name: Some(self.name.clone()),
            guest_irqs: self.irqs.clone(),
            guest_vqs: self.vqs.clone(),
            ..Disk::default()
        }
    }
}

/// Returns all virtio disks, sorted by name.
pub fn disks() -> Vec<GuestDisk> {
    let interrupts = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let entries = fs::read_dir("/sys/block").into_iter().flatten();
    let mut disks: Vec<GuestDisk> = entries
        .flatten()
        .filter_map(|entry| disk(&entry.path(), &interrupts))
        .collect();
    disks.sort_by(|a, b| a.name.cmp(&b.name));
    disks
}

fn disk(path: &Path, interrupts: &str) -> Option<GuestDisk> {
    let device = fs::canonicalize(path.join("device")).ok()?;
    let virtio = device.file_name()?.to_str()?.to_owned();
    virtio.strip_prefix("virtio")?.parse::<u32>().ok()?;
    let read = |file: &str| fs::read_to_string(path.join(file)).unwrap_or_default();
    let (irqs, shares_irq) = irqs_of(interrupts, &virtio);
    Some(GuestDisk {
        name: path.file_name()?.to_str()?.to_owned(),
        dev: parse_dev(&read("dev"))?,
        serial: read("serial").trim().to_owned(),
        virtio,
        irqs,
        vqs: Vec::new(),
        shares_irq,
    })
}

/// Parses `254:16` to the kernel's dev_t.
pub(crate) fn parse_dev(text: &str) -> Option<u64> {
    let (major, minor) = text.trim().split_once(':')?;
    let (major, minor): (u64, u64) = (major.parse().ok()?, minor.parse().ok()?);
    Some(major << 20 | minor)
}

/// Returns the interrupts of a device's queues from /proc/interrupts, and whether other devices may
/// share them. The interrupts are named `virtio3-req.0` for a queue, `virtio3-virtqueues` for all
/// queues, or like the device.
fn irqs_of(interrupts: &str, virtio: &str) -> (Vec<u64>, bool) {
    let mut queues: Vec<(u64, u64)> = Vec::new();
    let mut shares = false;
    for line in interrupts.lines() {
        let Some((irq, rest)) = line.split_once(':') else {
            continue;
        };
        let Ok(irq) = irq.trim().parse::<u64>() else {
            continue;
        };
        for name in rest.split([' ', ',']) {
            let Some(what) = name.strip_prefix(virtio) else {
                continue;
            };
            if let Some(queue) = what.strip_prefix("-req.").and_then(|n| n.parse().ok()) {
                queues.push((queue, irq));
            } else if what == "-virtqueues" || what.is_empty() {
                queues.push((0, irq));
                shares |= what.is_empty();
            }
        }
    }
    queues.sort_unstable();
    (queues.into_iter().map(|(_, irq)| irq).collect(), shares)
}

/// Assigns the virtqueues in the recorded events to the disks. A virtqueue is identified by its
/// interrupt or, if the interrupt is shared, by the notification that follows a disk's requests.
pub(super) fn learn_queues(events: Stream, disks: &mut [GuestDisk]) -> Result<()> {
    let mut seen = Seen::default();
    for event in events {
        seen.event(&event.map_err(unwritten)?);
    }
    for disk in disks {
        disk.vqs = if disk.shares_irq || disk.irqs.is_empty() {
            seen.notified_after(disk.dev)
        } else {
            seen.interrupted_by(&disk.irqs)
        };
    }
    Ok(())
}

/// Interrupts and notifications in a recording.
#[derive(Default)]
struct Seen {
    /// Pairs of interrupt and virtqueue, in order of appearance.
    interrupts: Vec<(u64, u64)>,
    /// Number of notifications of a virtqueue right after a request on the same thread, by (device,
    /// virtqueue), and number of all its notifications.
    after: HashMap<(u64, u64), u64>,
    all: HashMap<u64, u64>,
    /// Device of the last request that a thread has issued without a notification yet, by thread.
    issued: HashMap<u32, u64>,
}

impl Seen {
    fn event(&mut self, event: &Event) {
        match event.kind {
            Kind::VringInterrupt if event.args[1] != 0 => {
                let pair = (event.args[0], event.args[1]);
                if !self.interrupts.contains(&pair) {
                    self.interrupts.push(pair);
                }
            }
            Kind::BlockRqIssue => {
                self.issued.insert(event.tid, event.args[0]);
            }
            Kind::VirtqueueNotify if event.args[0] != 0 => {
                let vq = event.args[0];
                *self.all.entry(vq).or_default() += 1;
                if let Some(dev) = self.issued.remove(&event.tid) {
                    *self.after.entry((dev, vq)).or_default() += 1;
                }
            }
            _ => {}
        }
    }

    fn interrupted_by(&self, irqs: &[u64]) -> Vec<u64> {
        let of = |irq: &u64| {
            let irq = *irq;
            let pairs = self.interrupts.iter().filter(move |pair| pair.0 == irq);
            pairs.map(|&(_, vq)| vq)
        };
        irqs.iter().flat_map(of).collect()
    }

    /// Returns the virtqueues that were mostly notified after requests of this device.
    fn notified_after(&self, dev: u64) -> Vec<u64> {
        let is_mostly = |vq: u64, count: u64| 2 * count > self.all.get(&vq).copied().unwrap_or(0);
        let mut vqs: Vec<u64> = self
            .after
            .iter()
            .filter(|&(&(of, vq), &count)| of == dev && is_mostly(vq, count))
            .map(|(&(_, vq), _)| vq)
            .collect();
        vqs.sort_unstable();
        vqs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERRUPTS: &str = "           CPU0       CPU1
  0:         33          0   IO-APIC   2-edge      timer
 11:          9          0   IO-APIC  11-fasteoi   virtio7, uhci_hcd:usb1
 24:          0          0   PCI-MSI 65536-edge      virtio3-config
 25:        120          1   PCI-MSI 65537-edge      virtio3-req.1
 26:         77          1   PCI-MSI 65538-edge      virtio3-req.0
 27:          3          0   PCI-MSI 65539-edge      virtio30-req.0
 28:          3          0   PCI-MSI 65540-edge      virtio4-virtqueues
NMI:          0          0   Non-maskable interrupts
";

    #[test]
    fn interrupts_are_found_by_queue() {
        assert_eq!(irqs_of(INTERRUPTS, "virtio3"), (vec![26, 25], false));
        assert_eq!(irqs_of(INTERRUPTS, "virtio4"), (vec![28], false));
        assert_eq!(irqs_of(INTERRUPTS, "virtio7"), (vec![11], true));
        assert_eq!(irqs_of(INTERRUPTS, "virtio9"), (vec![], false));
    }

    #[test]
    fn device_numbers_are_the_kernels_own() {
        assert_eq!(parse_dev("254:16\n"), Some(254 << 20 | 16));
        assert_eq!(parse_dev("254"), None);
    }

    #[test]
    fn queues_are_known_by_interrupt_or_by_what_came_before() {
        let mut seen = Seen::default();
        let mut event = |kind, tid, args: &[u64]| seen.event(&Event::new(0, kind, 0, tid, args));
        for _ in 0..3 {
            event(Kind::BlockRqIssue, 7, &[5, 0, 8, 0]);
            event(Kind::VirtqueueNotify, 8, &[0xbb]); // another device, another thread
            event(Kind::VirtqueueNotify, 7, &[0xaa]);
            event(Kind::VirtqueueNotify, 7, &[0xbb]); // the same thread, but no request before
            event(Kind::VringInterrupt, 0, &[26, 0xaa]);
        }
        event(Kind::BlockRqIssue, 7, &[5, 0, 8, 0]); // the queue's kick was suppressed
        event(Kind::VirtqueueNotify, 7, &[0xbb]);
        assert_eq!(seen.notified_after(5), [0xaa]);
        assert_eq!(seen.notified_after(6), [0; 0]);
        assert_eq!(seen.interrupted_by(&[25, 26]), [0xaa]);
    }
}
