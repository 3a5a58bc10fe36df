//! Tests an image whose server was killed while two clients wrote.

use super::commands::PRELUDE;
use super::support::nbd::{Nbd, make_image, tool};
use super::support::{as_arg, disk_dir};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

const WRITER: &str = include_str!("writer.py");
const READER: &str = include_str!("reader.py");
const SIZE: u64 = 4 << 30;

/// A flush on one connection covers earlier writes on the other, as CAN_MULTI_CONN promises.
///
/// Flushed data survives the server's death, and the image is sound.
#[test]
fn what_was_flushed_outlives_the_server() {
    for (format, cache) in [
        ("raw", "none"),
        ("raw", "writeback"),
        ("qcow2", "none"),
        ("qcow2", "writethrough"),
        ("qed", "writeback"),
    ] {
        let dir = disk_dir();
        let image = make_image(dir.path(), format, SIZE);
        let state = as_arg(&dir.path().join("state"));
        let args = ["--format", format, "--cache", cache, "--iothreads", "2"];
        let mut nbd = Nbd::start(&image, &args);
        let mut writer = Command::new("/usr/bin/python3")
            .args(["-c", &format!("{PRELUDE}{WRITER}")])
            .envs([("URI", nbd.uri()), ("STATE", state.clone())])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 is installed by `make setup`");
        // Kills the server after some flushes, at any point of its work. The pipe stays open.
        let mut flushes = BufReader::new(writer.stdout.take().expect("piped")).lines();
        let count = flushes.by_ref().take(40).count();
        assert_eq!(count, 40, "the writer ended");
        nbd.signal("KILL");
        assert!(writer.wait().expect("a child").success());
        nbd.end();
        if format != "raw" {
            // Clusters may be leaked (status 3), but nothing else may be wrong.
            //
            // The lock of the image is released only when the kernel has finished the server's I/O.
            let checked = tool(
                dir.path(),
                "qemu-img",
                &["check", "-U", "-f", format, &image],
            );
            let status = checked.status.code();
            assert!(matches!(status, Some(0 | 3)), "{format}: {checked:?}");
        }
        let nbd = Nbd::start(&image, &args);
        nbd.python(&format!("{PRELUDE}{READER}"), &[("STATE", &state)]);
    }
}
