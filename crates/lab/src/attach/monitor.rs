//! Reads the addresses of the disks' doorbells and their MSI-X messages from QEMU's monitor, and
//! changes nothing in QEMU.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Found, Qemu};
use crate::error::Result;
use crate::qmp::Qmp;

const CONNECT: Duration = Duration::from_secs(2);
/// PCI device ids of virtio-blk: transitional, and modern (virtio 1.x, 4.1.2 and 5.2.1).
const VIRTIO: u64 = 0x1af4;
const BLOCK: [u64; 2] = [0x1001, 0x1042];
/// BAR and offset of the doorbells of a modern virtio device in QEMU (hw/virtio/virtio-pci.c). The
/// doorbells are 4 bytes apart, or a page with page-per-vq=on.
const MODERN_BAR: u64 = 4;
const DOORBELLS: u64 = 0x3000;
/// BAR and offset of the doorbell of a device without a modern BAR, which has I/O ports. All queues
/// share one doorbell, to which the queue's number is written (virtio 1.x, 4.1.4.10, "Legacy
/// Interfaces").
const LEGACY_BAR: u64 = 0;
const LEGACY_DOORBELL: u64 = 16;
/// BAR that starts with the MSI-X table.
const MSIX_BAR: u64 = 1;
const MSIX_ENTRY: u64 = 16;
/// Maximum number of queues of a device.
const MAX_QUEUES: u64 = 1024;

/// Queries the monitor and adds the replies to `qemu`.
pub(super) fn ask(socket: &Path, qemu: &mut Qemu) -> Result<()> {
    let mut qmp = Qmp::connect(socket, CONNECT)?;
    let version = qmp.execute("query-version", json!({}))?;
    let number = |name: &str| version["qemu"][name].as_u64().unwrap_or(0);
    let package = version["package"].as_str().unwrap_or_default();
    let (major, minor, micro) = (number("major"), number("minor"), number("micro"));
    let text = format!("{major}.{minor}.{micro} {package}");
    qemu.version.get_or_insert(text.trim().to_owned());
    let buses = qmp.execute("query-pci", json!({}))?;
    let mut devices = Vec::new();
    for bus in buses.as_array().into_iter().flatten() {
        collect(&bus["devices"], &mut devices);
    }
    for device in devices {
        let name = device["qdev_id"].as_str().unwrap_or_default();
        if name.is_empty() {
            continue;
        }
        let known = qemu.disks.iter().position(|one| one.disk.name == name);
        let index = known.unwrap_or_else(|| {
            qemu.problems
                .push(format!("{name} was plugged in later: its image is unknown"));
            qemu.disks.push(plugged(name));
            qemu.disks.len() - 1
        });
        describe(&mut qmp, &device, &mut qemu.disks[index])?;
    }
    Ok(())
}

fn plugged(name: &str) -> Found {
    let mut found = Found::default();
    found.disk.name = name.to_owned();
    found.disk.device = "virtio-blk".into();
    found
}

/// Collects virtio-blk devices, also behind bridges.
fn collect(devices: &Value, found: &mut Vec<Value>) {
    for device in devices.as_array().into_iter().flatten() {
        let id = &device["id"];
        let is_ours = id["vendor"] == VIRTIO && BLOCK.iter().any(|&block| id["device"] == block);
        if is_ours {
            found.push(device.clone());
        }
        collect(&device["pci_bridge"]["devices"], found);
    }
}

fn describe(qmp: &mut Qmp, device: &Value, found: &mut Found) -> Result<()> {
    let name = found.disk.name.clone();
    let mut property = |property: &str| {
        let path = format!("/machine/peripheral/{name}");
        qmp.execute("qom-get", json!({"path": path, "property": property}))
            .unwrap_or_default()
    };
    let queues = property("num-queues").as_u64().unwrap_or(1);
    // 65535 means one queue per CPU until the device is realised.
    let queues = queues.clamp(1, MAX_QUEUES);
    let distance = if property("page-per-vq") == true {
        4096
    } else {
        4
    };
    if let Some(bar) = bar(device, MODERN_BAR, "memory") {
        found.disk.doorbells = (0..queues)
            .map(|n| bar + DOORBELLS + n * distance)
            .collect();
    } else if let Some(port) = bar(device, LEGACY_BAR, "io") {
        found.disk.doorbells = (0..queues).map(|_| port + LEGACY_DOORBELL).collect();
    }
    if !found.disk.doorbells.is_empty() {
        found.disk.identified_by.get_or_insert("qmp".into());
    }
    if let Some(bar) = bar(device, MSIX_BAR, "memory") {
        let mut messages = Vec::new();
        for queue in 0..queues {
            // The first message is for configuration changes.
            let entry = bar + (1 + queue) * MSIX_ENTRY;
            let command = json!({"command-line": format!("xp /4wx {entry:#x}")});
            let answer = qmp.execute("human-monitor-command", command)?;
            messages.push(message(answer.as_str().unwrap_or_default()));
        }
        found.disk.msi = by_queue(&messages);
    }
    Ok(())
}

/// Returns the messages by queue. A queue without a message has zeroes, which no message has.
fn by_queue(messages: &[Option<(u64, u64)>]) -> Vec<(u64, u64)> {
    let known = messages.iter().rposition(Option::is_some);
    let known = &messages[..known.map_or(0, |last| last + 1)];
    known.iter().map(|one| one.unwrap_or_default()).collect()
}

/// Returns the guest-physical address or port of a BAR. Returns `None` if the BAR has another type
/// or the guest has not set it.
fn bar(device: &Value, number: u64, sort: &str) -> Option<u64> {
    let regions = device["regions"].as_array()?;
    let region = regions.iter().find(|region| region["bar"] == number)?;
    let address = region["address"].as_i64()?;
    let is_set = region["type"] == sort && address > 0;
    is_set.then_some(address as u64)
}

/// Parses address and data of `00000000fe003010: 0xfee01004 0x00000000 0x00000022 0x00000000`.
/// Returns `None` for a masked or empty message.
fn message(text: &str) -> Option<(u64, u64)> {
    let (_, words) = text.split_once(':')?;
    let word = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let words: Vec<u64> = words.split_whitespace().map_while(word).collect();
    match words[..] {
        [low, high, data, control] if low != 0 && control & 1 == 0 => {
            Some((high << 32 | low, data))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_from_the_monitor() {
        let text = "00000000febf1010: 0xfee01004 0x00000000 0x00000022 0x00000000\r\n";
        assert_eq!(message(text), Some((0xfee0_1004, 0x22)));
        assert_eq!(message(&text.replace("00000000\r", "00000001\r")), None);
        assert_eq!(message("Cannot access memory"), None);
    }

    #[test]
    fn a_queue_without_a_message_keeps_its_place() {
        let (first, third) = ((1, 2), (1, 4));
        let messages = [Some(first), None, Some(third), None];
        assert_eq!(by_queue(&messages), [first, (0, 0), third]);
        assert_eq!(by_queue(&[None, None]), []);
    }

    #[test]
    fn devices_behind_bridges_count() {
        let disk = |name: &str| {
            json!({"id": {"vendor": 6900, "device": 4162}, "qdev_id": name, "regions": [
                {"bar": 1, "type": "memory", "address": 4273737728u64},
                {"bar": 4, "type": "memory", "address": -1}]})
        };
        let bridge = json!({"id": {"vendor": 1, "device": 2},
            "pci_bridge": {"devices": [disk("behind")]}});
        let mut found = Vec::new();
        collect(&json!([disk("a"), bridge]), &mut found);
        let names: Vec<_> = found
            .iter()
            .map(|one| one["qdev_id"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["a", "behind"]);
        assert_eq!(bar(&found[0], MSIX_BAR, "memory"), Some(4_273_737_728));
        assert_eq!(bar(&found[0], MSIX_BAR, "io"), None);
        assert_eq!(bar(&found[0], MODERN_BAR, "memory"), None);
    }
}
