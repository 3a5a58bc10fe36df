//! Counts VM exits of a process's guests with KVM's debugfs (`kvm/PID-FD/exits`).

use std::fs;
use std::path::Path;

const KVM: &str = "/sys/kernel/debug/kvm";

/// Returns the number of all exits so far. Returns `None` if the process runs no KVM guest, or
/// debugfs is not readable.
pub fn of(pid: u32) -> Option<u64> {
    below(Path::new(KVM), pid)
}

fn below(kvm: &Path, pid: u32) -> Option<u64> {
    let prefix = format!("{pid}-");
    let guests = fs::read_dir(kvm).ok()?.flatten();
    let guests = guests.filter(|one| one.file_name().to_string_lossy().starts_with(&prefix));
    let exits = guests.filter_map(|one| {
        let text = super::read(one.path().join("exits")).ok()?;
        text.trim().parse().ok()
    });
    exits.reduce(u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_the_exits_of_its_guests() {
        let dir = tempfile::tempdir().unwrap();
        for (guest, exits) in [("12-7", "100\n"), ("12-9", "11\n"), ("123-7", "5000\n")] {
            fs::create_dir(dir.path().join(guest)).unwrap();
            fs::write(dir.path().join(guest).join("exits"), exits).unwrap();
        }
        fs::write(dir.path().join("exits"), "999").unwrap();
        assert_eq!(below(dir.path(), 12), Some(111));
        assert_eq!(below(dir.path(), 1), None);
        assert_eq!(below(&dir.path().join("none"), 12), None);
    }
}
