//! QEMU as the front-end, as far as its firmware goes: handshake, one read
//! of the boot sector, and the end.

mod support;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use support::guest::eventually;
use support::served::Served;

/// mov al, 'F'; out 0xe9, al; cli; hlt
const BOOT_CODE: [u8; 6] = [0xb0, b'F', 0xe6, 0xe9, 0xfa, 0xf4];

struct Qemu(Child);

impl Qemu {
    fn start(socket: &Path, console: &Path) -> Qemu {
        let chardev = format!("socket,id=c,path={}", socket.display());
        let debugcon = format!("file:{}", console.display());
        let child = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-accel", "tcg", "-m", "64M", "-smp", "2"])
            .args(["-object", "memory-backend-memfd,id=m,size=64M,share=on"])
            .args(["-machine", "q35,memory-backend=m"])
            .args(["-chardev", &chardev])
            .args(["-device", "vhost-user-blk-pci,chardev=c,bootindex=0"])
            .args(["-debugcon", &debugcon])
            .stdin(Stdio::null())
            .spawn()
            .expect("QEMU (Debian: qemu-system-x86) must be installed");
        Qemu(child)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn qemu_boots_from_the_disk_and_another_one_does_after_it() {
    let served = Served::new();
    {
        let mut disk = served.disk.bytes.lock().unwrap();
        disk[..6].copy_from_slice(&BOOT_CODE);
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    }
    let console = served.path.with_file_name("console");
    for _ in 0..2 {
        let mut qemu = Qemu::start(&served.path, &console);
        eventually("the boot sector runs", || {
            assert_eq!(qemu.0.try_wait().unwrap(), None, "QEMU ended");
            std::fs::read(&console).is_ok_and(|bytes| bytes.contains(&b'F'))
        });
        assert_eq!(served.export.status().peer_pid, Some(qemu.0.id() as i32));
        assert!(served.export.status().queues_running >= 1);
        assert!(served.disk.is_active());
        drop(qemu);
        served.wait_for_disconnect();
        assert!(!served.disk.is_active());
        std::fs::remove_file(&console).unwrap();
    }
}
