//! Tests backups of an encrypted disk, during which QEMU's guest agent freezes the file systems.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine, program};
use fathom_tests::{Place, run};

const STEP: Duration = Duration::from_secs(120);

/// Returns the QEMU options with which users give a guest the agent's port.
fn port(socket: &Path) -> Vec<String> {
    let socket = socket.display();
    [
        "-chardev",
        &format!("socket,id=ga,path={socket},server=on,wait=off"),
        "-device",
        "virtserialport,chardev=ga,name=org.qemu.guest_agent.0",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Writes files all the time, and starts the agent.
const BEGIN: &str = "
    mkfs.ext4 -q -F $DEVICE && mkdir -p /mnt && mount -t ext4 $DEVICE /mnt || exit 1
    (n=0; while :; do n=$((n + 1)); echo line $n >> /mnt/log; cp /mnt/log /mnt/copy$((n % 7)); done) \
        >/dev/null 2>&1 </dev/null &
    for port in /sys/class/virtio-ports/*; do
        [ \"$(cat $port/name)\" = org.qemu.guest_agent.0 ] && agent=/dev/${port##*/}
    done
    mkdir -p /var/run /tmp
    qemu-ga -m virtio-serial -p $agent -t /tmp -f /tmp/agent.pid >/tmp/agent.log 2>&1 </dev/null &
    until [ -s /mnt/copy6 ]; do sleep 0.1; done";

/// Returns whether the file system needs no recovery from its journal.
fn is_settled(image: &Path) -> bool {
    let said = Command::new(program("dumpe2fs").unwrap())
        .arg("-h")
        .arg(image)
        .output();
    let said = String::from_utf8_lossy(&said.unwrap().stdout).into_owned();
    assert!(said.contains("Filesystem features"), "{said}");
    !said.contains("needs_recovery")
}

#[test]
fn a_backup_is_of_a_file_system_that_stands_still() {
    let place = Place::new();
    let (image, key) = (place.path("image"), place.path("key"));
    std::fs::write(&key, "a secret").unwrap();
    let key = format!("file:{}", key.display());
    let [image, agent] = [image, place.sockets().join("agent")].map(text);
    let fathom = |args: &[&str]| {
        let ended = run(args, STEP);
        assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
    };
    let create = [
        "img",
        "create",
        "-q",
        "-f",
        "luks",
        "-o",
        "iter-time=10",
        "--key",
        &key,
    ];
    fathom(&[&create[..], &[&image, "96M"]].concat());
    let args = ["--format", "luks", "--key", &key];
    let server = place.serve("disk", Path::new(&image), &args);
    let api = text(server.api().expect("it has one").to_owned());
    let mut guest = Guest::boot(&Machine {
        disks: vec![Disk::vhost_user("disk", server.socket())],
        programs: vec![program("qemu-ga").unwrap()],
        extra: port(Path::new(&agent)),
        ..Machine::default()
    })
    .unwrap();
    let device = guest.device("disk").unwrap();
    guest
        .check(&format!("DEVICE={device}\n{BEGIN}"), STEP)
        .unwrap();
    let agent = format!("unix:{agent}");
    let mut lines = 0_u64;
    for n in 0..3 {
        let copy = text(place.path(&format!("copy{n}")));
        let full = ["backup", "full", &api, &copy, "-O", "raw", "--quiet"];
        fathom(&[&full[..], &["--guest-agent", &agent]].concat());
        assert!(
            is_settled(Path::new(&copy)),
            "backup {n} is of a file system that was not frozen"
        );
        let checked = Command::new(program("e2fsck").unwrap())
            .args(["-fn", &copy])
            .output();
        let checked = checked.unwrap();
        assert!(checked.status.success(), "{checked:?}");
        // The guest has written more since.
        let wait = format!(
            "until [ $(wc -l < /mnt/log) -gt {lines} ]; do sleep 0.1; done; wc -l < /mnt/log"
        );
        lines = guest.check(&wait, STEP).unwrap().trim().parse().unwrap();
        std::fs::remove_file(copy).unwrap();
    }
    // Without the agent, the guest keeps writing during the backup.
    let copy = text(place.path("unasked"));
    fathom(&["backup", "full", &api, &copy, "-O", "raw", "--quiet"]);
    assert!(!is_settled(Path::new(&copy)));
    guest.quit().unwrap();
    server.stop().unwrap();
    // The data of the guest cannot be read without the key.
    let has_lines = |path: &str| {
        let bytes = std::fs::read(path).unwrap();
        let mut blocks = bytes.chunks(4096);
        blocks.any(|block| block.starts_with(b"line 1\nline 2\n"))
    };
    assert!(has_lines(&copy) && !has_lines(&image));
}

fn text(path: PathBuf) -> String {
    path.to_str().unwrap().to_owned()
}
