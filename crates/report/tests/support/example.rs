//! A made-up analysis with content in every part, for the renderers' tests.

use fathom_report::analysis::{
    Analysis, CallRow, Delivery, Distribution, Exact, HeatMap, HostClass, Joined, Layer, LayerRow,
    LockRow, Overhead, Picture, Pictured, Point, QemuStep, RoundRow, ThreadCalls, TimeLine, Truth,
    Wiki,
};
use fathom_report::distribution::Tally;
use fathom_run::{
    Benchmark, BlockDevice, Disk, Environment, Machine, Role, RunKind, Scenario, Thread,
};

/// Number of requests of [`analysis`].
pub const REQUESTS: i64 = 2000;
/// A name that would end a script, move a cursor, and split a line of a table.
#[allow(dead_code, reason = "not every test needs it")]
pub const HOSTILE: &str = "vd</script><img src=x onerror=alert(1)>\x1b[2J,\"a\"\nb";

/// A layer, and the time in ns that a request spends in it.
type Timed = (Layer, fn(i64) -> i64);

/// Layers, and the time that the `i`th request spends in each; every 100th waits for the device.
const LAYERS: [Timed; 11] = [
    (Layer::GuestSubmit, |i| 2_000 + i % 7 * 100),
    (Layer::GuestBatch, |i| 300 + i % 3 * 10),
    (Layer::KickExit, |_| 450),
    (Layer::KickKvm, |i| 700 + i % 11 * 5),
    (Layer::ServerWake, |i| 5_000 + i % 13 * 200),
    (Layer::ServerPop, |_| 250),
    (Layer::HostDevice, |i| {
        if i % 100 == 99 {
            900_000 + i
        } else {
            60_000 + i % 17 * 1_000
        }
    }),
    (Layer::ServerFinish, |i| i % 50 - 1),
    (Layer::InterruptEntry, |i| 3_000 + i % 5 * 100),
    (Layer::GuestBottomHalf, |_| 1_500),
    (Layer::GuestReturn, |i| 2_200 + i % 19 * 20),
];

fn times(i: i64) -> Vec<(Layer, i64)> {
    LAYERS.iter().map(|(layer, of)| (*layer, of(i))).collect()
}

fn total(i: i64) -> i64 {
    times(i).iter().map(|(_, time)| time).sum()
}

fn distribution(values: impl Iterator<Item = i64>) -> Distribution {
    values.collect::<Tally>().finish()
}

fn rows() -> Vec<LayerRow> {
    let over = |of: &dyn Fn(i64) -> i64, numbers: &[i64]| {
        numbers.iter().map(|&i| of(i)).sum::<i64>() as f64 / numbers.len() as f64
    };
    let mut sorted: Vec<i64> = (0..REQUESTS).collect();
    sorted.sort_by_key(|&i| total(i));
    let count = sorted.len();
    let middle = &sorted[count * 45 / 100..count * 55 / 100];
    let tail = &sorted[count - count / 100..];
    let (all, slow) = (over(&total, &sorted), over(&total, tail));
    let row = |&(layer, of): &Timed| {
        let (name, group) = layer.describe();
        let tail = over(&of, tail);
        LayerRow {
            layer,
            group,
            name,
            time: distribution((0..REQUESTS).map(of)),
            share: over(&of, &sorted) / all,
            middle_mean: Some(over(&of, middle)),
            tail_mean: Some(tail),
            tail_share: Some(tail / slow),
            negative: (0..REQUESTS).filter(|&i| of(i) < 0).count() as u64,
        }
    };
    LAYERS.iter().map(row).collect()
}

fn joined(i: i64) -> Joined {
    let points = [
        Point::Call,
        Point::Issue,
        Point::Kick,
        Point::Exit,
        Point::Signal,
        Point::Wake,
        Point::HostIssue,
        Point::HostComplete,
        Point::Interrupt,
        Point::Handler,
        Point::Complete,
        Point::Return,
    ];
    let ends = times(i).into_iter().scan(0, |at, (_, time)| {
        *at += time;
        Some(*at)
    });
    let at: Vec<i64> = std::iter::once(0).chain(ends).collect();
    Joined {
        number: i as u64,
        operation: "read",
        offset: i as u64 * 4096,
        length: 4096,
        start: 7_000_000_000 + i * 200_000,
        points: points.into_iter().zip(at).collect(),
        layers: times(i),
        total: total(i),
        delivery: Delivery::Kicked,
        batch: 1,
        host: HostClass::Direct,
    }
}

fn exact() -> Exact {
    Exact {
        total: distribution((0..REQUESTS).map(total)),
        layers: rows(),
        truth: Truth {
            requests: REQUESTS as u64 + 1,
            joined: REQUESTS as u64,
            unmatched: 1,
            clock_method: "KVM's TSC offset".into(),
            clock_error_ns: Some(35),
            kicked: 1900,
            batched: 40,
            polled: 60,
            hosts: vec![(HostClass::Direct, 1990), (HostClass::Cached, 10)],
            ..Truth::default()
        },
        slowest: (0..20).map(|k| joined(REQUESTS - 1 - k * 100)).collect(),
        heat: HeatMap {
            start: (0..20).map(|i| i * 20_000_000).collect(),
            column_ns: 20_000_000,
            latency: vec![65_536, 81_920, 98_304, 786_432, 917_504],
            cells: (0..20)
                .flat_map(|i| [(i, 0, 60), (i, 1, 39), (i, 4, 1)])
                .collect(),
        },
    }
}

fn thread(tid: u32, name: &str, role: Role, vcpu: Option<u32>) -> Thread {
    Thread {
        pid: 500,
        tid,
        name: name.into(),
        role,
        vcpu,
    }
}

fn call(name: &str, time: i64, count: i64) -> CallRow {
    CallRow {
        name: name.into(),
        time: distribution((0..count).map(|i| time + i % 10 * 100)),
        post: distribution((1..count).map(|i| 1_000 + i % 3)),
        total: (0..count).map(|i| time + i % 10 * 100).sum(),
        post_total: (1..count).map(|i| 1_000 + i % 3).sum(),
    }
}

fn calls() -> Vec<ThreadCalls> {
    vec![
        ThreadCalls {
            thread: thread(501, "worker 0", Role::Io, None),
            calls: vec![
                call("io_uring_enter", 62_000, 2000),
                call("write", 900, 1900),
            ],
        },
        ThreadCalls {
            thread: thread(502, "CPU 0/KVM", Role::Vcpu, Some(0)),
            calls: vec![call("ioctl(KVM_RUN)", 71_000, 1950)],
        },
    ]
}

fn round(name: &str, traced: &[&str], on_host: bool, mean_ns: f64) -> RoundRow {
    RoundRow {
        name: name.into(),
        traced: traced.iter().map(|&text| text.to_owned()).collect(),
        on_host,
        benchmark: Some(Benchmark {
            operations: REQUESTS as u64,
            mean_ns,
            wall_ns: (mean_ns * REQUESTS as f64) as u64,
            errors: 0,
            call: if on_host { "pread" } else { "read" }.into(),
        }),
    }
}

fn machine(kernel: &str, cpus: u32) -> Machine {
    Machine {
        kernel: kernel.into(),
        cpu: "AMD EPYC 9354".into(),
        cpus,
        clock_source: "tsc".into(),
        trace_clock: "x86-tsc".into(),
    }
}

/// Returns an analysis with every kind of content, small enough to read.
pub fn analysis() -> Analysis {
    Analysis {
        kind: RunKind::Lab,
        title: "wiki: read of 4096 bytes, depth 1, disk served by fathom".into(),
        created: 1_278_082_512,
        scenario: Some(Scenario {
            rw: "read".into(),
            block_size: 4096,
            iodepth: 1,
            queues: 1,
            server: "fathom".into(),
            aio: "io_uring".into(),
            cache: "none".into(),
            polling: false,
        }),
        environment: Environment {
            host: machine("6.12.41", 64),
            guest: Some(machine("6.1.0", 1)),
            remote: None,
            accelerator: "kvm".into(),
            qemu: Some("10.0.2".into()),
            fathom: "0.1.0".into(),
            stretched: true,
        },
        disks: vec![Disk {
            name: "disk0".into(),
            under_test: true,
            device: "vhost-user-blk".into(),
            image: Some("/srv/disk.img".into()),
            identified_by: Some("eventfd-id".into()),
            guest_name: Some("vda".into()),
            host: Some(BlockDevice {
                dev: 259 << 20,
                name: "nvme0n1".into(),
                scheduler: "none".into(),
            }),
            ..Disk::default()
        }],
        rounds: vec![
            round("control-1", &[], false, 78_000.0),
            round(
                "requests-1",
                &["guest", "kvm", "block", "fathom"],
                false,
                93_500.0,
            ),
            round("host-1", &[], true, 69_250.5),
        ],
        exact: Some(exact()),
        wiki: Some(Wiki {
            cumulative: vec![
                ("Guest benchmark".into(), 196_528.0, None),
                ("Guest virtio-pci".into(), 170_829.0, Some(202_095.0)),
                ("Host benchmark".into(), 128_862.0, None),
            ],
            delta: vec![
                ("Guest".into(), 25_699.0, 13.08),
                ("Host I/O".into(), 130_235.0, 66.27),
            ],
            notes: vec!["QEMU paio: not measured in any round".into()],
        }),
        calls: calls(),
        locks: vec![LockRow {
            thread: thread(502, "CPU 0/KVM", Role::Vcpu, Some(0)),
            address: 0x89_b800,
            name: Some("the big QEMU lock".into()),
            source: "futex",
            time: distribution((0..100).map(|i| 20_000 + i * 10)),
            total: (0..100).map(|i| 20_000 + i * 10).sum(),
        }],
        qemu: vec![
            QemuStep {
                wiki: "virtio_queue_notify".into(),
                today: "virtio_queue_notify".into(),
                time: distribution((0..2000).map(|i| 45_000 + i % 9)),
            },
            QemuStep {
                wiki: "laio_submit".into(),
                today: "io_submit()".into(),
                time: Distribution::default(),
            },
        ],
        time_lines: vec![TimeLine {
            thread: thread(501, "worker 0", Role::Io, None),
            spans: vec![
                (0, 62_000, "io_uring_enter".into()),
                (62_000, 63_000, "user".into()),
                (63_000, 64_000, "write".into()),
            ],
        }],
        picture: Some(Picture {
            round: "syscalls".into(),
            length: 64_000,
            request: Some(Pictured {
                number: 7,
                operation: "read",
                offset: 28_672,
                length: 4096,
                start: 1_000,
                total: 60_000,
            }),
            why_not: None,
        }),
        overhead: vec![Overhead {
            traced: ["guest", "kvm", "block", "fathom"].map(String::from).into(),
            traced_ns: 93_500.0,
            untraced_ns: 78_000.0,
            difference_ns: 15_500.0,
            low_ns: 14_000.0,
            high_ns: 16_900.0,
            pairs: 5,
        }],
        problems: vec!["the guest's clock source is not the TSC".into()],
    }
}
