//! Tests `fathom lab run wiki` on KVM: every layer of every request, for every server of disks.
//!
//! The runs share emulated KVM hosts, so the tests work on any machine. Each host keeps one CPU of
//! the machine busy. All times on the emulated hosts are stretched, so the tests check that
//! requests are found in all layers and that layers add up, but never how long they take.

mod truth;

use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_lab::KvmHost;
use fathom_lab::experiment::wiki::{Options, Transport};
use fathom_lab::experiment::{Yield, nested};
use fathom_lab::workload::{Limit, Rw};
use fathom_lab::{Aio, Error, server};
use fathom_report::analysis::{Analysis, Exact, Layer, Truth};
use fathom_run::{Kind, Role, Run};
use fathom_tests::fathom;
use tempfile::TempDir;

/// A KVM host and the folder for its runs.
struct Bench {
    host: KvmHost,
    dir: TempDir,
    runs: u32,
}

/// The results of a run.
struct Done {
    dir: PathBuf,
    run: Run,
    analysis: Analysis,
    yielded: Yield,
}

const REQUESTS: u64 = 200;
/// Layers that begin with one side's clock and end with the other's.
///
/// The number is the direction in which a wrong clock offset of KVM shortens the layer.
const ACROSS: [(Layer, i64); 2] = [(Layer::KickExit, -1), (Layer::InterruptEntry, 1)];
const SOON: Duration = Duration::from_secs(120);

impl Bench {
    fn new() -> Bench {
        Bench {
            host: KvmHost::boot(&fathom()).unwrap(),
            dir: tempfile::tempdir().unwrap(),
            runs: 0,
        }
    }

    /// Returns the options of a short run: one pair of rounds, and a small image.
    fn options(&mut self) -> Options {
        self.runs += 1;
        let mut options = Options::new(fathom(), self.dir.path().join(self.runs.to_string()));
        options.rounds = 1;
        options.limit = Some(Limit::Operations(REQUESTS));
        options.size = Some(8 << 20);
        options
    }

    fn run(&mut self, change: impl Fn(&mut Options)) -> Done {
        const ATTEMPTS: usize = 3;
        for _ in 1..ATTEMPTS {
            match self.attempt(&change) {
                Err(error) if nested::stands_still(&error) => {
                    eprintln!("{error}\nonce more, in another KVM host");
                    self.host = KvmHost::boot(&fathom()).unwrap();
                }
                done => return done.unwrap(),
            }
        }
        self.attempt(&change).unwrap()
    }

    fn attempt(&mut self, change: impl Fn(&mut Options)) -> Result<Done, Error> {
        let mut options = self.options();
        change(&mut options);
        let yielded = self.cell(&options, &mut |step| eprintln!("{step}"))?;
        Ok(Done::load(&options.output, yielded))
    }

    fn refused(&mut self, change: impl FnOnce(&mut Options)) -> Error {
        let mut options = self.options();
        change(&mut options);
        self.cell(&options, &mut |_| {}).unwrap_err()
    }

    fn cell(&mut self, options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Yield, Error> {
        let (settings, folder) = (options.to_settings(), &options.output);
        nested::run_in(&mut self.host, "wiki", &settings, folder, progress)
    }
}

impl Done {
    fn load(dir: &Path, yielded: Yield) -> Done {
        Done {
            dir: dir.to_owned(),
            run: Run::load(dir).unwrap(),
            analysis: fathom_report::analyse(dir, &fathom_report::Options::default()).unwrap(),
            yielded,
        }
    }

    fn exact(&self) -> &Exact {
        self.analysis.exact.as_ref().expect("an exact breakdown")
    }

    /// Checks that every request was followed, the clocks agree, and the layers of each request add
    /// up.
    fn is_sound(&self, unmatched: u64) {
        let truth = &self.exact().truth;
        let said = || format!("{truth:?} {:?}", self.analysis.problems);
        assert!(truth.requests >= REQUESTS, "{}", said());
        assert!(truth.unmatched <= unmatched, "{}", said());
        assert_eq!(truth.violations, 0, "{}", said());
        assert_eq!(truth.lost, [], "{}", said());
        let error = truth.clock_error_ns.unwrap();
        let across = ACROSS.iter().filter_map(|(layer, _)| self.median(*layer));
        let across = across.min().expect("a way across");
        assert!(error * 10 <= across, "{across} ns across: {}", said());
        for request in &self.exact().slowest {
            let sum: i64 = request.layers.iter().map(|(_, ns)| ns).sum();
            assert_eq!(sum, request.total, "{request:?}");
        }
    }

    /// Returns the median time in ns of the requests that pass the layer.
    fn median(&self, layer: Layer) -> Option<i64> {
        let layers = self.exact().slowest.iter().flat_map(|one| &one.layers);
        let mut times: Vec<i64> = layers
            .filter(|(one, _)| *one == layer)
            .map(|(_, ns)| *ns)
            .collect();
        times.sort_unstable();
        times.get(times.len() / 2).copied()
    }

    /// Repeats the analysis with an offset of KVM's clock that is wrong by `more_ns`.
    fn truth_with_offset(&self, more_ns: i64) -> Truth {
        let mut run = self.run.clone();
        for clocks in run.rounds.iter_mut().map(|round| &mut round.clocks) {
            let (Some(first), Some(last)) = (clocks.host.first(), clocks.host.last()) else {
                continue;
            };
            let ns = (last.monotonic_ns - first.monotonic_ns) as f64;
            let ticks = (last.tsc - first.tsc) as f64 / ns * more_ns as f64;
            if let Some(offset) = &mut clocks.guest_offset {
                offset.before = offset.before.wrapping_add(ticks as i64);
                offset.after = offset.before;
            }
        }
        run.save(&self.dir).unwrap();
        let truth = Done::load(&self.dir, Yield::default())
            .exact()
            .truth
            .clone();
        self.run.save(&self.dir).unwrap();
        truth
    }

    fn has(&self, layer: Layer) -> bool {
        self.exact().layers.iter().any(|row| row.layer == layer)
    }

    fn has_layers(&self, layers: &[Layer]) {
        let rows = &self.exact().layers;
        let seen: Vec<Layer> = rows.iter().map(|row| row.layer).collect();
        for layer in layers {
            assert!(seen.contains(layer), "{layer:?} is not among {seen:?}");
        }
    }

    /// Returns the number of events of a kind in a round's file.
    fn count(&self, round: &str, stream: &str, kind: Kind) -> u64 {
        let round = self
            .run
            .rounds
            .iter()
            .find(|one| one.name == round)
            .unwrap();
        let stream = round.streams.iter().find(|one| one.name == stream).unwrap();
        let events = round.open(&self.dir, stream).unwrap();
        events
            .filter(|event| event.as_ref().unwrap().kind == kind)
            .count() as u64
    }

    /// Returns the number of system calls of this name by all threads.
    fn calls(&self, name: &str) -> u64 {
        let threads = self.analysis.calls.iter();
        let calls = threads.flat_map(|thread| &thread.calls);
        calls
            .filter(|call| call.name == name)
            .map(|call| call.time.count)
            .sum()
    }
}

/// Fathom reports its own stages, so every layer is known.
fn fathom_is_followed_through_every_layer(bench: &mut Bench) {
    let done = bench.run(|_| {});
    done.is_sound(0);
    done.has_layers(&[
        Layer::GuestSubmit,
        Layer::KickExit,
        Layer::KickKvm,
        Layer::ServerWake,
        Layer::HostSubmit,
        Layer::HostDevice,
        Layer::HostReap,
        Layer::ServerNotify,
        Layer::GuestBottomHalf,
        Layer::GuestReturn,
    ]);
    // The host wakes a vCPU that slept. A vCPU that was preempted is only scheduled again.
    assert!(done.has(Layer::VcpuWake) || done.has(Layer::VcpuSchedule));
    a_wrong_offset_of_the_clocks_is_noticed(&done);
    let disk = done.run.disk().unwrap();
    assert_eq!(disk.device, "vhost-user-blk");
    assert!(
        disk.identified_by.is_some() && disk.host.is_some(),
        "{disk:?}"
    );
    let mapped: u64 = disk.extents.iter().map(|extent| extent.length).sum();
    assert_eq!(mapped, 8 << 20);

    // The kernel, KVM and Fathom have each counted the requests that were made.
    let round = "requests-1";
    assert_eq!(
        done.count(round, "benchmark", Kind::BenchOperation),
        REQUESTS
    );
    assert_eq!(done.count(round, "guest", Kind::BlockRqComplete), REQUESTS);
    assert_eq!(done.count(round, "fathom", Kind::FathomRequest), REQUESTS);
    // Other programs may use the image's device.
    assert!(done.count(round, "block", Kind::BlockRqIssue) >= REQUESTS);
    // Other devices have interrupts, too.
    assert!(done.count(round, "kvm", Kind::KvmMsiSetIrq) >= REQUESTS);
    assert!(done.calls("write") >= REQUESTS);

    let environment = &done.run.environment;
    assert!(environment.stretched && environment.accelerator == "kvm");
    assert!(
        environment
            .guest
            .as_ref()
            .is_some_and(|guest| guest.cpus == 1)
    );
    for benchmark in done.run.rounds.iter().map(|round| round.benchmark.as_ref()) {
        let benchmark = benchmark.unwrap();
        assert_eq!((benchmark.operations, benchmark.errors), (REQUESTS, 0));
    }
    let calls: Vec<&str> = done
        .run
        .rounds
        .iter()
        .filter(|round| round.on_host)
        .map(|round| round.benchmark.as_ref().unwrap().call.as_str())
        .collect();
    assert_eq!(calls, ["read", "pread"]);

    let wiki = done.analysis.wiki.as_ref().unwrap();
    let percent: f64 = wiki.delta.iter().map(|(_, _, percent)| percent).sum();
    assert!((percent - 100.0).abs() < 0.01, "{:?}", wiki.delta);
    // On a busy machine a few requests need no kick, and then means of different requests are
    // compared.
    let negative = wiki.delta.iter().any(|(_, ns, _)| *ns < 0.0);
    assert_eq!(wiki.notes.is_empty(), !negative, "{:?}", wiki.notes);
    assert_eq!(done.analysis.overhead[0].pairs, 1);
    what_limits_it_is_seen_in_a_round_of_its_own(&done.yielded);
}

fn what_limits_it_is_seen_in_a_round_of_its_own(yielded: &Yield) {
    let evidence = yielded.evidence.as_ref().unwrap();
    assert_eq!(evidence.load.requests, REQUESTS);
    let crossings = evidence.crossings.as_ref().unwrap();
    // On a busy machine a few requests need neither kick nor interrupt.
    let seen = [crossings.kicks, crossings.interrupts, crossings.exits];
    for count in seen {
        assert!(count.unwrap() >= REQUESTS / 2, "{crossings:?}");
    }
    assert!(evidence.bare.is_some() && evidence.guest.is_some());
    let mut layers = evidence.layers.iter();
    assert!(layers.any(|one| one.name == "host: device"), "{evidence:?}");
}

/// QEMU's thread pool makes one pread64() per request, and QEMU's own log shows the same.
fn qemu_is_followed_with_its_own_events(bench: &mut Bench) {
    let done = bench.run(|options| {
        options.server = server::Kind::Qemu;
        options.aio = Aio::Threads;
    });
    done.is_sound(0);
    done.has_layers(&[Layer::KickExit, Layer::HostDevice, Layer::GuestReturn]);
    // QEMU's system calls show the steps inside QEMU.
    done.has_layers(&[
        Layer::ServerWake,
        Layer::ServerTake,
        Layer::HostSubmit,
        Layer::HostReap,
        Layer::ServerAnswer,
    ]);
    let wiki = done.analysis.wiki.as_ref().unwrap();
    let layers: Vec<&str> = wiki.delta.iter().map(|(name, ..)| name.as_str()).collect();
    // The row stands alone, or together with an inner row if too few wake-ups are identified.
    let switching = |layer: &&str| layer.starts_with("Host/QEMU switching");
    assert!(layers.iter().any(switching), "{layers:?}");
    let negative = wiki.delta.iter().any(|(_, ns, _)| *ns < 0.0);
    let said = wiki.notes.iter().any(|note| note.contains("negative"));
    assert_eq!(said, negative, "{wiki:?}");
    assert_eq!(done.run.disk().unwrap().device, "virtio-blk");
    assert_eq!(done.calls("pread64"), REQUESTS);
    let submits = done
        .analysis
        .qemu
        .iter()
        .find(|step| step.wiki == "paio_submit");
    assert_eq!(submits.unwrap().time.count, REQUESTS);
    // Every request takes some of QEMU's locks.
    assert!(done.count("qemu-locks", "qemu", Kind::Qemu) > REQUESTS);
}

/// The threads have no names; their system calls show which of them serves.
fn storage_daemon_is_followed_by_its_calls(bench: &mut Bench) {
    let done = bench.run(|options| {
        options.server = server::Kind::Qsd;
        options.pairs_only = true;
    });
    done.is_sound(0);
    done.has_layers(&[Layer::KickExit, Layer::HostDevice, Layer::GuestReturn]);
    done.has_layers(&[Layer::ServerWake, Layer::ServerTake, Layer::HostSubmit]);
    let server = done.run.disk().unwrap().server_pid;
    let mut threads = done.run.threads.iter();
    let serves = threads.any(|one| Some(one.pid) == server && one.role == Role::Io);
    assert!(serves, "{:?}", done.run.threads);
}

/// With a wrong offset, effects come before their causes.
fn a_wrong_offset_of_the_clocks_is_noticed(done: &Done) {
    for (layer, direction) in ACROSS {
        let more = 2 * direction * done.median(layer).unwrap();
        let truth = done.truth_with_offset(more);
        assert!(truth.violations > 0, "{more} ns: {truth:?}");
    }
}

/// Many requests share kicks and interrupts.
fn batches_are_told_from_single_requests(bench: &mut Bench) {
    let done = bench.run(|options| {
        options.rw = Rw::RandRead;
        options.iodepth = 32;
        options.pairs_only = true;
    });
    done.is_sound(REQUESTS / 100);
    let truth = &done.exact().truth;
    // A batch may lack an event, and then counts as incomplete.
    let told = truth.kicked + truth.batched + truth.polled;
    assert!(told + truth.incomplete >= truth.joined, "{truth:?}");
    assert!(told * 10 >= truth.joined * 9, "{truth:?}");
    assert!(truth.batched > truth.kicked, "{truth:?}");
}

/// Without an ioeventfd every doorbell goes through QEMU's user space.
fn a_way_without_ioeventfd_is_seen_as_such(bench: &mut Bench) {
    let done = bench.run(|options| {
        options.server = server::Kind::Qemu;
        options.transport = Transport::NoIoeventfd;
        options.pairs_only = true;
    });
    assert!(done.count("requests-1", "kvm", Kind::KvmUserspaceExit) >= REQUESTS);
}

/// Legacy virtio: the doorbell is an I/O port, and the report names it.
fn a_way_by_an_io_port_is_followed_and_named(bench: &mut Bench) {
    let done = bench.run(|options| {
        options.server = server::Kind::Qemu;
        options.transport = Transport::Legacy;
        options.pairs_only = true;
    });
    done.is_sound(0);
    done.has_layers(&[Layer::KickExit, Layer::HostDevice, Layer::GuestReturn]);
    assert!(done.count("requests-1", "kvm", Kind::KvmPio) >= REQUESTS);
    let problems = &done.analysis.problems;
    assert!(
        problems.iter().any(|line| line.contains("I/O port")),
        "{problems:?}"
    );
}

/// Without MSI-X QEMU raises a pin of the IO-APIC, and the report names it.
fn a_legacy_interrupt_is_followed_and_named(bench: &mut Bench) {
    let done = bench.run(|options| {
        options.server = server::Kind::Qemu;
        options.transport = Transport::Intx;
        options.pairs_only = true;
    });
    done.is_sound(0);
    assert_eq!(done.exact().truth.incomplete, 0);
    done.has_layers(&[Layer::HostDevice, Layer::InterruptEntry]);
    assert!(done.count("requests-1", "kvm", Kind::KvmSetIrq) >= REQUESTS);
    let problems = &done.analysis.problems;
    assert!(
        problems.iter().any(|line| line.contains("INTx")),
        "{problems:?}"
    );
}

/// A run that cannot work ends with one line that says why, and the host is as before.
fn failures_are_told(bench: &mut Bench) {
    let full = bench.refused(|options| options.size = Some(64 << 30));
    assert!(full.to_string().contains("no space left"), "{full}");
    let misfit = bench.refused(|options| {
        options.server = server::Kind::Fathom;
        options.transport = Transport::NoIoeventfd;
    });
    assert!(misfit.to_string().contains("--disk qemu"), "{misfit}");
    let left = bench
        .host
        .check("ls /var/tmp /sys/kernel/tracing/instances", SOON);
    let left = left.unwrap();
    assert!(!left.contains("fathom-scratch-"), "{left}");
    assert!(!left.contains("kvm"), "{left}");
}

#[test]
fn every_layer_of_every_request_on_a_real_kvm() {
    let mut bench = Bench::new();
    fathom_is_followed_through_every_layer(&mut bench);
    qemu_is_followed_with_its_own_events(&mut bench);
    storage_daemon_is_followed_by_its_calls(&mut bench);
    batches_are_told_from_single_requests(&mut bench);
    a_way_without_ioeventfd_is_seen_as_such(&mut bench);
    a_way_by_an_io_port_is_followed_and_named(&mut bench);
    a_legacy_interrupt_is_followed_and_named(&mut bench);
    failures_are_told(&mut bench);
}

/// Runs in another KVM host, at the same time.
#[test]
fn delays_on_a_real_kvm() {
    let mut bench = Bench::new();
    truth::delays_are_found_where_they_were_put(&mut bench);
    truth::a_filter_delays_in_the_queue(&mut bench);
}
