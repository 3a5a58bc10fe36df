//! Tests with QEMU as the front-end. The guest is a boot sector that reads another sector in a loop
//! and reports the result of each read.

use crate::support::guest::eventually;
use crate::support::served::Served;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const READ_FOR_EVER: [u8; 0x30] = [
    0x31, 0xc0, // 7c00: xor ax, ax
    0x8e, 0xd8, // mov ds, ax
    0x8e, 0xd0, // mov ss, ax
    0xbc, 0x00, 0x7c, // mov sp, 0x7c00
    0xfb, // sti
    0xbe, 0x20, 0x7c, // 7c0a: mov si, 0x7c20
    0xb4, 0x42, // mov ah, 0x42 (extended read)
    0xcd, 0x13, // int 0x13
    0xb0, b'F', // mov al, 'F'
    0x73, 0x02, // jnc 0x7c17
    0xb0, b'E', // mov al, 'E'
    0xe6, 0xe9, // 7c17: out 0xe9, al
    0xeb, 0xef, // jmp 0x7c0a
    0, 0, 0, 0, 0, //
    // 7c20: one sector, to 0:8000, from sector 5
    0x10, 0, 1, 0, 0, 0x80, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0,
];

fn bootable() -> Served {
    let served = Served::new();
    install(&served);
    served
}

fn install(served: &Served) {
    let mut disk = served.disk.bytes.lock();
    disk[..READ_FOR_EVER.len()].copy_from_slice(&READ_FOR_EVER);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
}

struct Qemu {
    child: Child,
    console: PathBuf,
    qmp: UnixStream,
}

impl Qemu {
    fn start(name: &str, socket: &Path, more: &[&str]) -> Qemu {
        let console = socket.with_file_name(format!("{name}.console"));
        let monitor = socket.with_file_name(format!("{name}.qmp"));
        let _ = std::fs::remove_file(&monitor);
        let chardev = format!("socket,id=c,path={},reconnect=1", socket.display());
        let child = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-accel", "tcg", "-m", "64M", "-smp", "2"])
            .args(["-object", "memory-backend-memfd,id=m,size=64M,share=on"])
            .args(["-machine", "q35,memory-backend=m"])
            .args(["-chardev", &chardev])
            .args(["-device", "vhost-user-blk-pci,chardev=c,bootindex=0"])
            .args(["-debugcon", &format!("file:{}", console.display())])
            .args([
                "-qmp",
                &format!("unix:{},server=on,wait=off", monitor.display()),
            ])
            .args(more)
            .stdin(Stdio::null())
            .spawn()
            .expect("QEMU (Debian: qemu-system-x86) must be installed");
        let mut qmp = None;
        eventually("QEMU's monitor listens", || {
            qmp = UnixStream::connect(&monitor).ok();
            qmp.is_some()
        });
        let mut qemu = Qemu {
            child,
            console,
            qmp: qmp.unwrap(),
        };
        qemu.command("qmp_capabilities", "{}");
        qemu
    }

    /// Executes a command and returns its reply.
    fn command(&mut self, name: &str, arguments: &str) -> String {
        let message = format!(r#"{{"execute": "{name}", "arguments": {arguments}}}"#);
        self.qmp.write_all(message.as_bytes()).unwrap();
        let mut lines = BufReader::new(&self.qmp).lines();
        loop {
            let line = lines.next().expect("QEMU lives").unwrap();
            assert!(!line.contains(r#""error""#), "{name}: {line}");
            if line.starts_with(r#"{"return""#) {
                return line;
            }
        }
    }

    /// Returns the number of reads that the guest has completed.
    fn reads(&mut self) -> usize {
        assert_eq!(self.child.try_wait().unwrap(), None, "QEMU ended");
        let console = std::fs::read(&self.console).unwrap_or_default();
        assert!(!console.contains(&b'E'), "a read has failed");
        console.len()
    }

    fn makes_progress(&mut self) {
        let before = self.reads();
        eventually("the guest reads on", || self.reads() >= before + 20);
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn qemu_boots_from_the_disk_and_another_one_does_after_it() {
    let served = bootable();
    for name in ["first", "second"] {
        let mut qemu = Qemu::start(name, &served.path, &[]);
        qemu.makes_progress();
        assert_eq!(
            served.export.status().peer_pid,
            Some(qemu.child.id() as i32)
        );
        assert!(served.disk.is_active());
        drop(qemu);
        served.wait_for_disconnect();
        assert!(!served.disk.is_active());
    }
}

#[test]
fn a_guest_is_stopped_continued_and_reset() {
    let served = bootable();
    let mut qemu = Qemu::start("guest", &served.path, &[]);
    for _ in 0..3 {
        qemu.makes_progress();
        qemu.command("stop", "{}");
        assert!(!served.disk.is_active());
        assert_eq!(served.export.status().queues_running, 0);
        let reads = qemu.reads();
        qemu.command("cont", "{}");
        eventually("the guest goes on", || qemu.reads() > reads);
        qemu.command("system_reset", "{}");
    }
    qemu.makes_progress();
}

#[test]
fn a_guest_survives_its_disk_being_served_anew() {
    let mut served = bootable();
    let mut qemu = Qemu::start("guest", &served.path, &[]);
    for _ in 0..2 {
        qemu.makes_progress();
        served.restart();
        install(&served);
    }
    qemu.makes_progress();
}

#[test]
fn a_guest_migrates_with_its_disk() {
    let (here, there) = (bootable(), bootable());
    let wire = here.path.with_file_name("migration");
    let uri = format!("unix:{}", wire.display());
    let mut source = Qemu::start("source", &here.path, &[]);
    source.makes_progress();
    let mut destination = Qemu::start("destination", &there.path, &["-incoming", &uri]);
    assert!(!there.disk.is_active());
    source.command("migrate", &format!(r#"{{"uri": "{uri}"}}"#));
    eventually("the migration completes", || {
        let status = source.command("query-migrate", "{}");
        assert!(!status.contains("failed"), "{status}");
        status.contains("completed")
    });
    assert!(!here.disk.is_active());
    destination.makes_progress();
    assert!(there.disk.is_active());
    let status = destination.command("query-status", "{}");
    assert!(status.contains(r#""status": "running""#), "{status}");
}
