//! Runs the collectors on this machine under artificial limits, which the evidence must name. No
//! test depends on how fast or busy the machine is.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fathom_lab::Process;
use fathom_lab::evidence::{Kind, Sampler, Watch, Watched, device_below, device_numbers};
use fathom_limiter::judge;
use fathom_run::Series;
use fathom_run::evidence::{Evidence, Load, ThreadRole};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

const WINDOW: Duration = Duration::from_secs(2);

/// A process that does nothing but run, or nothing.
fn process(script: &str, dir: &Path) -> Process {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    Process::spawn("sh", command, &dir.join("log")).unwrap()
}

fn spinner(dir: &Path) -> Process {
    process("while :; do :; done", dir)
}

/// Returns the evidence and the series of these processes during a piece of work.
fn during(pids: &[u32], step: Duration, work: impl FnOnce()) -> (Evidence, Vec<Series>) {
    let processes = pids.iter().map(|&pid| Watched::new(pid, Kind::Server));
    let watch = Watch {
        processes: processes.collect(),
        step,
        ..Watch::default()
    };
    let sampler = Sampler::start(watch).unwrap();
    work();
    sampler.stop()
}

fn seen(pids: &[u32]) -> Evidence {
    during(pids, Duration::from_millis(100), || thread::sleep(WINDOW)).0
}

/// An image on a file system that has a block device.
fn image() -> tempfile::NamedTempFile {
    let mut image = tempfile::Builder::new().tempfile_in(".").unwrap();
    image.write_all(&vec![7; 16 << 20]).unwrap();
    image.as_file().sync_all().unwrap();
    image
}

/// A process that reads an image, one request of this size after the other, past the page cache.
/// `before` is run by the shell first.
fn reader(before: &str, image: &Path, size: &str, dir: &Path) -> Process {
    let script = format!(
        "{before}\nexec fio --name=reader --thread --filename={} --readonly --rw=randread \
         --bs={size} --direct=1 --ioengine=psync --time_based --runtime=1000 \
         --output=/dev/null",
        image.display()
    );
    process(&script, dir)
}

/// Returns the evidence of a process that reads 4 KiB at a time from an image. All of its reads
/// count as the load.
fn of_reader(reader: &Process, image: &Path) -> Evidence {
    let device = device_below(image).unwrap();
    assert!(
        device.is_some(),
        "this test needs a build on a file system with a block device"
    );
    let sampler = Sampler::start(Watch {
        processes: vec![Watched::new(reader.pid(), Kind::Load)],
        device,
        ..Watch::default()
    });
    let sampler = sampler.unwrap();
    thread::sleep(WINDOW);
    let (mut evidence, _) = sampler.stop();
    let bytes = evidence.device.as_ref().unwrap().own_bytes.unwrap();
    let requests = bytes / 4096;
    evidence.load = Load {
        threads: 1,
        depth: 1,
        requests,
        bytes,
        mean_ns: evidence.seconds * 1e9 / requests as f64,
        ..Load::default()
    };
    evidence
}

/// Waits until a process has read from storage.
fn until_it_reads(reader: &Process) {
    // (The program itself may have been read from storage.)
    let tasks = format!("/proc/{}/task", reader.pid());
    let of_thread = |task: &Path| {
        let text = fs::read_to_string(task.join("io")).unwrap_or_default();
        let bytes = { text.lines() }.find_map(|line| line.strip_prefix("read_bytes: "));
        bytes.is_some_and(|bytes| bytes != "0") && !task.ends_with(reader.pid().to_string())
    };
    fathom_testing::until("the first read", || {
        let mut tasks = fs::read_dir(&tasks).unwrap().flatten();
        tasks.any(|task| of_thread(&task.path()))
    });
}

/// A control group with a limit, of either version.
struct Cap(PathBuf);

impl Cap {
    fn around(process: &Process) -> Cap {
        let cap = Cap::make().and_then(|cap| {
            fs::write(cap.0.join("cgroup.procs"), process.pid().to_string())?;
            Ok(cap)
        });
        cap.unwrap_or_else(|error| {
            panic!(
                "this test caps a process: run it as root where cgroups limit CPU time ({error})"
            )
        })
    }

    /// Makes a group that may read this often per second from an image's device.
    fn of_reads(image: &Path, reads: u32) -> Cap {
        let (major, minor) = device_numbers(image).unwrap();
        let name = format!("fathom-test-reads-{}", std::process::id());
        let root = Path::new("/sys/fs/cgroup");
        let is_v2 = root.join("cgroup.controllers").exists();
        let (parent, file, text) = match is_v2 {
            true => (
                root.to_owned(),
                "io.max",
                format!("{major}:{minor} riops={reads}"),
            ),
            false => (
                root.join("blkio"),
                "blkio.throttle.read_iops_device",
                format!("{major}:{minor} {reads}"),
            ),
        };
        let cap = Cap(parent.join(name));
        let make = || {
            if is_v2 {
                fs::write(root.join("cgroup.subtree_control"), "+io")?;
            }
            fs::create_dir(&cap.0)?;
            fs::write(cap.0.join(file), text)
        };
        let made = make();
        made.expect("this test makes a control group: run it as root where cgroups limit I/O");
        cap
    }

    /// Makes a group that may use a twentieth of a CPU.
    fn make() -> std::io::Result<Cap> {
        let name = format!("fathom-test-{}", std::process::id());
        let root = Path::new("/sys/fs/cgroup");
        if root.join("cgroup.controllers").exists() {
            fs::write(root.join("cgroup.subtree_control"), "+cpu")?;
            let cap = Cap(root.join(name));
            fs::create_dir(&cap.0)?;
            fs::write(cap.0.join("cpu.max"), "5000 100000")?;
            return Ok(cap);
        }
        let cap = Cap(root.join("cpu").join(name));
        fs::create_dir(&cap.0)?;
        fs::write(cap.0.join("cpu.cfs_period_us"), "100000")?;
        fs::write(cap.0.join("cpu.cfs_quota_us"), "5000")?;
        Ok(cap)
    }
}

impl Drop for Cap {
    /// Removes the control group, whose process must have ended.
    fn drop(&mut self) {
        let is_gone = || fs::remove_dir(&self.0).is_ok();
        // (A second panic would end the whole test program.)
        match thread::panicking() {
            true => drop(is_gone()),
            false => fathom_testing::until("the end of the control group", is_gone),
        }
    }
}

#[test]
fn a_capped_process_is_judged_as_capped() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = spinner(dir.path());
    let cap = Cap::around(&process);
    let evidence = seen(&[process.pid()]);
    let verdict = judge(&evidence);
    process.kill().unwrap();
    assert_eq!(
        verdict.rule(),
        Some("cpu-cap"),
        "{verdict:#?}\n{evidence:#?}"
    );
    let name = cap.0.file_name().unwrap().to_string_lossy();
    assert!(verdict.subject().unwrap().ends_with(&*name), "{verdict:#?}");
    let throttling = evidence.cgroup.unwrap();
    assert!(
        throttling.seconds <= evidence.seconds * 1.1,
        "{throttling:?}"
    );
}

#[test]
fn a_reader_at_its_io_limit_is_judged_as_capped() {
    let (dir, image) = (tempfile::tempdir().unwrap(), image());
    let cap = Cap::of_reads(image.path(), 30);
    let join = format!("echo $$ > {}/cgroup.procs", cap.0.display());
    let reader = reader(&join, image.path(), "4k", dir.path());
    until_it_reads(&reader);
    let evidence = of_reader(&reader, image.path());
    drop(reader);
    let verdict = judge(&evidence);
    assert_eq!(
        verdict.rule(),
        Some("io-cap"),
        "{verdict:#?}\n{evidence:#?}"
    );
    let name = cap.0.file_name().unwrap().to_string_lossy();
    assert!(verdict.subject().unwrap().ends_with(&*name), "{verdict:#?}");
}

#[test]
fn a_reader_next_to_a_greater_one_has_a_neighbour() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let image = image();
    let small = reader("", image.path(), "4k", dirs[0].path());
    let large = reader("", image.path(), "1M", dirs[1].path());
    until_it_reads(&small);
    until_it_reads(&large);
    let mut evidence = of_reader(&small, image.path());
    drop(large);
    // On a busy machine, the readers wait for a CPU, and the device is idle meanwhile.
    evidence.device.as_mut().unwrap().utilisation = 100.0;
    evidence
        .threads
        .iter_mut()
        .for_each(|one| one.waiting = None);
    let verdict = judge(&evidence);
    assert_eq!(
        verdict.rule(),
        Some("neighbour"),
        "{verdict:#?}\n{evidence:#?}"
    );
}

#[test]
fn processes_that_share_a_cpu_are_judged_as_waiting_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let processes = [spinner(dir.path()), spinner(dir.path())];
    let allowed = sched_getaffinity(None).unwrap();
    let cpu = (0..CpuSet::MAX_CPU)
        .find(|&cpu| allowed.is_set(cpu))
        .unwrap();
    let mut one = CpuSet::new();
    one.set(cpu);
    for process in &processes {
        let pid = Pid::from_raw(process.pid() as i32);
        sched_setaffinity(pid, &one).unwrap();
    }
    let evidence = seen(&[processes[0].pid(), processes[1].pid()]);
    let verdict = judge(&evidence);
    assert_eq!(
        verdict.rule(),
        Some("run-queue"),
        "{verdict:#?}\n{evidence:#?}"
    );
    // The two had one CPU together.
    let spinners = evidence
        .threads
        .iter()
        .filter(|one| one.role == ThreadRole::Main);
    let (cpu, waiting) = spinners.fold((0.0, 0.0), |sum, one| {
        (sum.0 + one.cpu, sum.1 + one.waiting.unwrap())
    });
    assert!(
        cpu <= evidence.seconds * 1.05 && waiting > cpu * 0.8,
        "{evidence:#?}"
    );
    // The machine's own counters include this CPU time.
    let host = evidence.host.unwrap();
    let busy: f64 = host.busy.iter().chain(&host.steal).sum();
    assert!(
        busy / 100.0 > cpu / evidence.seconds * 0.9,
        "{busy}% and {cpu} s"
    );
}

#[test]
fn a_process_that_sleeps_is_not_suspected() {
    let dir = tempfile::tempdir().unwrap();
    let (spins, sleeps) = (spinner(dir.path()), process("exec sleep 1000", dir.path()));
    let evidence = seen(&[sleeps.pid(), spins.pid()]);
    let cpu = |process: &Process| {
        let of = evidence
            .threads
            .iter()
            .filter(|one| one.pid == process.pid());
        of.map(|one| one.cpu).sum::<f64>()
    };
    assert!(cpu(&sleeps) < cpu(&spins) / 10.0, "{evidence:#?}");
    let alone = seen(&[sleeps.pid()]);
    let verdict = judge(&alone);
    let subject = verdict.subject().unwrap_or_default();
    assert!(!["sh", "sleep"].contains(&subject), "{verdict:#?}");
}

/// Runs until the flag is set, and returns the seconds of CPU that the kernel gave it.
fn spin(until: &AtomicBool) -> f64 {
    while !until.load(Ordering::Relaxed) {
        std::hint::spin_loop();
    }
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
}

#[test]
fn a_thread_that_comes_and_goes_is_seen_with_its_name_and_share() {
    let mut spent = 0.0;
    let step = Duration::from_millis(20);
    let (evidence, series) = during(&[std::process::id()], step, || {
        let until = Arc::new(AtomicBool::new(false));
        let flag = until.clone();
        let worker = thread::Builder::new().name("worker 7".into());
        let worker = worker.spawn(move || spin(&flag)).unwrap();
        thread::sleep(WINDOW / 2);
        until.store(true, Ordering::Relaxed);
        spent = worker.join().unwrap();
        thread::sleep(WINDOW / 4);
    });
    let mut threads = evidence.threads.iter();
    let worker = threads.find(|one| one.name == "worker 7").unwrap();
    assert_eq!(worker.role, ThreadRole::Io);
    let ratio = worker.cpu / spent;
    assert!((0.7..1.05).contains(&ratio), "{} of {spent}", worker.cpu);
    let busy = series
        .iter()
        .find(|one| one.name == "workers.busy")
        .unwrap();
    let sum = busy.values.iter().sum::<f64>() / 100.0 * busy.step;
    assert!(
        (0.6..1.05).contains(&(sum / spent)),
        "{sum} of {spent}: {busy:?}"
    );
    assert!(busy.values.last().unwrap() < &1.0, "{busy:?}");
    let host = series.iter().find(|one| one.name == "host.busy").unwrap();
    assert!(
        host.values.iter().all(|busy| (0.0..=100.0).contains(busy)),
        "{host:?}"
    );
}

#[test]
fn process_started_within_the_window_is_counted_from_its_start() {
    let dir = tempfile::tempdir().unwrap();
    let sampler = Sampler::start(Watch::default()).unwrap();
    let newcomers = sampler.newcomers();
    let mut process = spinner(dir.path());
    thread::sleep(WINDOW / 4);
    newcomers.watch(Watched::new(process.pid(), Kind::Qemu));
    thread::sleep(WINDOW / 4);
    let (evidence, _) = sampler.stop();
    let stat = fs::read_to_string(format!("/proc/{}/schedstat", process.pid())).unwrap();
    let ns: f64 = stat.split(' ').next().unwrap().parse().unwrap();
    process.kill().unwrap();
    newcomers.watch(Watched::new(process.pid(), Kind::Qemu)); // the sampler has stopped
    let mut threads = evidence.threads.iter();
    let spinner = threads.find(|one| one.pid == process.pid()).unwrap();
    let ratio = spinner.cpu / (ns / 1e9);
    assert!((0.8..=1.0).contains(&ratio), "{ratio}: {evidence:#?}");
}
