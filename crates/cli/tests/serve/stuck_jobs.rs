//! Checks commits and streams that are stopped while the storage of an image does not respond.

use crate::driver::{Driver, MAX_LEN, Request, with_disk};
use crate::exercise::differ;
use crate::kinds::{SIZE, qemu_img, qemu_io};
use crate::mirror::{check, flat};
use crate::mirror_ends::{FileSystem, ThawOnDrop};
use crate::streams::{await_end, below};
use crate::support::{Kept, Served, as_arg, disk_dir, eventually, fathom, refused, stdout_of};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const LEN: usize = SIZE as usize;

/// Less than the 30 s that a job may take to end while its storage responds.
const AT_ONCE: Duration = Duration::from_secs(15);

fn raw(path: &str, byte: u8) {
    fs::write(path, vec![byte; LEN]).unwrap();
}

/// Makes a qcow2 image `name` above `base`.
fn overlay(dir: &Path, name: &str, base: &str, format: &str) -> String {
    let create = ["create", "-q", "-f", "qcow2", "-b", base, "-F", format];
    qemu_img(dir, &[&create[..], &[name]].concat());
    as_arg(&dir.join(name))
}

fn serve(image: &str, more: &[&str]) -> Served {
    let args = ["--format", "qcow2", "--sandbox", "off"];
    Served::start(image, &[&args, more].concat())
}

/// Returns the only job as `fathom info` shows it, or null if no job exists yet.
fn job(served: &Served) -> Value {
    let info = stdout_of(&["info", &served.api(), "--json"]);
    let info: Value = serde_json::from_str(&info).unwrap();
    let jobs = [&info["mirror"], &info["stream"]];
    let job = jobs.into_iter().find(|job| !job.is_null());
    job.cloned().unwrap_or_default()
}

/// Starts a job, and calls `stop` in the middle of it, after which storage must not respond any
/// more.
fn begin_stuck(served: &Served, args: &[&str], stop: impl FnOnce()) -> Kept {
    let mut begin = fathom();
    begin.args(args).args(["--quiet", "--speed", "4M"]);
    let begin = Kept::spawn(&mut begin);
    let copied = || job(served)["copied"].as_u64().unwrap_or_default();
    eventually("something is copied", || (copied() > 0).then_some(()));
    stop();
    eventually("nothing is copied any more", || {
        let before = copied();
        thread::sleep(Duration::from_millis(700));
        (copied() == before).then_some(())
    });
    assert_eq!(job(served)["phase"], "copying");
    begin
}

fn write(disk: &mut Driver<'_>, model: &mut [u8], at: usize, byte: u8) {
    let data = vec![byte; MAX_LEN];
    model[at..at + MAX_LEN].fill(byte);
    let offset = at as u64;
    assert!(disk.all(&[Request::Write { offset, data }])[0].is_ok());
}

fn is_refused_at_once(args: &[&str], words: &[&str]) {
    let begin = Instant::now();
    refused(1, args, words);
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
}

/// A late write to the base must not overwrite the data of another job, so no other job begins.
#[test]
fn stop_of_a_commit_into_a_hanging_base_is_refused_at_once() {
    for is_top in [true, false] {
        eprintln!("top: {is_top}");
        let dir = disk_dir();
        let dir = dir.path();
        let hangs = FileSystem::new(dir);
        let base = format!("{}/base", hangs.0);
        raw(&base, 1);
        let middle = overlay(dir, "middle", &base, "raw");
        qemu_io(dir, "middle", "qcow2", &["write -P 2 0 12M"]);
        let mut model = vec![2; LEN];
        let top = overlay(dir, "top", &middle, "qcow2");
        let mut served = serve(&top, &[]);
        let _thaw = ThawOnDrop(&hangs);
        let api = served.api();
        let commit = ["commit", &api, &base, "--transient"];
        let (commit, stop) = match is_top {
            true => (
                [&commit[..], &["--until-ready"]].concat(),
                ["mirror", "stop", &api, "--force"].to_vec(),
            ),
            false => (
                [&commit[..], &["--top", &middle]].concat(),
                ["stream", "stop", &api].to_vec(),
            ),
        };
        with_disk(&served.arg("s"), 1, |disk| {
            let begun = begin_stuck(&served, &commit, || hangs.freeze());
            is_refused_at_once(&stop, &["stopping", &base, "does not respond"]);
            assert_eq!(job(&served)["phase"], "stopping");
            write(disk, &mut model, MIB, 201);
            let others = [&commit[..], &["stream", "start", &api]];
            for other in others {
                refused(1, other, &["end"]);
            }
            is_refused_at_once(&stop, &["stopping"]);
            hangs.thaw();
            eventually("its end", || {
                (job(&served)["phase"] == "failed").then_some(())
            });
            await_end(&served);
            drop(begun);
            assert_eq!(differ(&disk.contents(), &model), None);
            stdout_of(&stop);
            write(disk, &mut model, 2 * MIB, 202);
            // A new commit completes.
            let again = match is_top {
                true => vec!["commit", &api, &base, "--transient", "--quiet"],
                false => [&commit[..], &["--quiet"]].concat(),
            };
            stdout_of(&again);
            write(disk, &mut model, 3 * MIB, 203);
            assert_eq!(differ(&disk.contents(), &model), None);
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        match is_top {
            true => assert_eq!(differ(&fs::read(&base).unwrap(), &model), None),
            false => {
                assert_eq!(below(dir, &top), Value::from(base));
                check(dir, "qcow2", &top);
                assert_eq!(differ(&flat(dir, "qcow2", &top), &model), None);
            }
        }
    }
}

/// A file of nbdfuse, whose reads are sent to an NBD server that can be stopped.
struct RemoteFile {
    server: Kept,
    _mounted: Kept,
    place: String,
}

impl RemoteFile {
    fn new(dir: &Path, byte: u8) -> RemoteFile {
        let (file, socket) = (as_arg(&dir.join("remote")), dir.join("n"));
        raw(&file, byte);
        let mut server = Command::new("qemu-nbd");
        server.args(["-t", "-r", "-f", "raw", "-k"]).arg(&socket);
        let server = Kept::spawn(server.arg(&file));
        eventually("the server is there", || socket.exists().then_some(()));
        let place = dir.join("far");
        fs::create_dir(&place).unwrap();
        let place = as_arg(&place);
        let uri = format!("nbd+unix:///?socket={}", as_arg(&socket));
        let mounted = Kept::spawn(Command::new("nbdfuse").args(["-r", &place, &uri]));
        let remote = RemoteFile {
            server,
            _mounted: mounted,
            place,
        };
        eventually("the file is there", || {
            fs::exists(remote.path()).unwrap().then_some(())
        });
        remote
    }

    fn path(&self) -> String {
        format!("{}/nbd", self.place)
    }

    fn halt(&self) {
        self.server.signal("STOP");
    }

    fn resume(&self) {
        self.server.signal("CONT");
    }
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        // After that, requests that wait for the server fail.
        let mut unmount = Command::new("umount");
        let _ = unmount.args(["--lazy", &self.place]).output();
    }
}

#[test]
fn stop_of_a_stream_from_a_hanging_file_is_refused_at_once() {
    let dir = disk_dir();
    let dir = dir.path();
    let far = RemoteFile::new(dir, 1);
    let mut model = vec![1; LEN];
    let top = overlay(dir, "top", &far.path(), "raw");
    let mut served = serve(&top, &["--stop-timeout", "3s"]);
    let api = served.api();
    let (start, stop) = (["stream", "start", &api], ["stream", "stop", &api]);
    with_disk(&served.arg("s"), 1, |disk| {
        let begun = begin_stuck(&served, &start, || far.halt());
        let words = ["stopping", &far.path(), "does not respond"];
        is_refused_at_once(&stop, &words);
        assert_eq!(job(&served)["phase"], "stopping");
        far.resume();
        eventually("its end", || {
            (job(&served)["phase"] == "failed").then_some(())
        });
        await_end(&served);
        drop(begun);
        stdout_of(&stop);
        write(disk, &mut model, MIB, 201);
        assert_eq!(differ(&disk.contents(), &model), None);
        // The stream does not delay the server's end either, and the image is valid.
        let begun = begin_stuck(&served, &start, || far.halt());
        let begin = Instant::now();
        assert_eq!(served.terminate().0, Some(1), "{}", served.log());
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
        drop(begun);
    });
    assert!(served.log().contains("are abandoned"), "{}", served.log());
    far.resume();
    // (The image is locked while its requests are in flight. The image may have leaked clusters.)
    eventually("the image is valid", || {
        let check = ["check", "-f", "qcow2", &top];
        let checked = Command::new("qemu-img").args(check).output().unwrap();
        [Some(0), Some(3)]
            .contains(&checked.status.code())
            .then_some(())
    });
    assert_eq!(below(dir, &top), Value::from(far.path()));
    assert_eq!(differ(&flat(dir, "qcow2", &top), &model), None);
}

/// The disk does not need this image yet, so reads of it can be abandoned.
#[test]
fn end_of_a_stream_whose_new_base_does_not_answer_succeeds() {
    let dir = disk_dir();
    let dir = dir.path();
    let far = RemoteFile::new(dir, 1);
    let own = as_arg(&dir.join("own"));
    raw(&own, 2);
    let mut model = vec![2; LEN];
    let top = overlay(dir, "top", &own, "raw");
    let mut served = serve(&top, &["--allow-dir", &far.place]);
    let (api, base) = (served.api(), far.path());
    let start = ["stream", "start", &api, "--base", &base];
    let stop = ["stream", "stop", &api];
    with_disk(&served.arg("s"), 1, |disk| {
        let begun = begin_stuck(&served, &start, || far.halt());
        let begin = Instant::now();
        let ended = stdout_of(&stop);
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
        assert!(ended.starts_with("failed"), "{ended}");
        await_end(&served);
        drop(begun);
        write(disk, &mut model, MIB, 201);
        stdout_of(&["stream", "start", &api, "--speed", "4M"]);
        // The end of the abandoned thread must not affect the other stream.
        far.resume();
        eventually("its end", || {
            (job(&served)["phase"] == "done").then_some(())
        });
        await_end(&served);
        write(disk, &mut model, 2 * MIB, 202);
        assert_eq!(differ(&disk.contents(), &model), None);
    });
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    fs::remove_file(own).unwrap();
    check(dir, "qcow2", &top);
    assert_eq!(below(dir, &top), Value::Null);
    assert_eq!(differ(&flat(dir, "qcow2", &top), &model), None);
}
