use super::*;

const FRAMES: &str = "\tffffffff81b04c5f blk_mq_start_request ([kernel.kallsyms])\n\
                      \tffffffff81b06a35 blk_mq_dispatch ([kernel.kallsyms])\n\
                      \t    7f00a1b2c3d4 pread64 (/usr/lib/libc.so.6)\n\
                      \t    56429bfaea50 [unknown] ([unknown])\n\
                      \t    7f00a1b2c3d4 main (/bin/fio)\n\n";

fn trace(of: Of, text: &str) -> (Vec<Handed>, Vec<Between>) {
    let watch = Watch {
        of,
        carriers: vec![(490, "qemu: ")],
        device: None,
        crossings: vec![Crossing::Switches, Crossing::WakeUps, Crossing::Calls],
    };
    let mut trace = Trace::new(watch, Modules::default());
    // The text may arrive in any pieces.
    for chunk in text.as_bytes().chunks(7) {
        trace.push(chunk);
    }
    trace.finish(Side::Host)
}

fn fork(new: u32, thread: u32, by: u32) -> String {
    format!("sh {by}/{by} 0.000000: PERF_RECORD_FORK({new}:{thread}):({by}:{by})\n")
}

fn issue(pid: u32, time: f64, rest: &str) -> String {
    format!("CPU 0/TCG {pid}/{pid} {time:.6}:     block:block_rq_issue: {rest}\n{FRAMES}")
}

fn event(pid: u32, time: f64, event: &str) -> String {
    format!("CPU 0/TCG {pid}/{pid} {time:.6}: {event}\n")
}

#[test]
fn requests_are_those_of_the_carriers_and_what_they_have_begun() {
    let text = [
        fork(2, 2, 0),
        fork(30, 30, 2),
        fork(490, 490, 1),
        fork(700, 700, 1),
        fork(495, 495, 490),
        fork(495, 496, 495),
        issue(495, 1.0, "254,0 R 4096 () 100 + 8 0x2,0,4 [fio]"),
        issue(495, 1.1, "254,0 RS 4096 () 200 + 8 [fio]"),
        // A worker of the kernel may carry requests of any process.
        issue(30, 1.2, "254,0 R 4096 () 300 + 8 [kworker/0:1]"),
        // Not followed: another process's, a write, a read-ahead, one of another size.
        issue(700, 1.3, "254,0 R 4096 () 400 + 8 [dd]"),
        issue(495, 1.4, "254,0 W 4096 () 500 + 8 [fio]"),
        issue(495, 1.5, "254,0 RA 4096 () 600 + 8 [fio]"),
        issue(495, 1.6, "254,0 R 8192 () 700 + 16 [fio]"),
        event(0, 1.7, "block:block_rq_complete: 254,0 R () 100 + 8 [0]"),
        event(0, 1.7, "block:block_rq_complete: 254,0 RS () 200 + 8 [0]"),
        event(0, 1.7, "block:block_rq_complete: 254,0 R () 400 + 8 [0]"),
    ];
    let (devices, _) = trace(Of::Block, &text.concat());
    assert_eq!(devices.len(), 1, "{devices:?}");
    let one = &devices[0];
    assert_eq!((one.device.as_str(), one.requests), ("254,0", 3));
    // 0.7 s of the first request, 0.6 s of the second.
    assert!((one.device_ns.unwrap() - 6.5e8).abs() < 1e3, "{one:?}");
    let all = &one.stacks;
    assert_eq!(
        (all[0].thread.as_str(), all[0].requests),
        ("qemu: CPU 0/TCG", 2)
    );
    assert_eq!(all[1].thread, "CPU 0/TCG");
    assert_eq!(
        all[0].frames, // without frames beyond an unknown function
        [
            "pread64 [libc.so.6]",
            "blk_mq_dispatch [kernel]",
            "blk_mq_start_request [kernel]"
        ]
    );
}

#[test]
fn a_scheduler_is_where_a_request_comes_before_its_disk() {
    let queued = |by: &str| {
        let issue = issue(495, 1.5, "254,16 R 4096 () 8 + 8 [x]");
        let text = [
            fork(495, 495, 490),
            issue.replace("1.5", "1.0").replace("rq_issue", "rq_insert"),
            issue.replace("CPU 0/TCG", by),
            event(0, 2.0, "block:block_rq_complete: 254,16 R () 8 + 8 [0]"),
        ];
        let (devices, _) = trace(Of::Block, &text.concat());
        let told = devices.into_iter().map(|one| (one.device, one.device_ns));
        told.collect::<Vec<_>>()
    };
    let (scheduler, disk) = ("254,16 scheduler".to_owned(), "254,16".to_owned());
    let both = [(scheduler, Some(1e9)), (disk, Some(5e8))];
    assert_eq!(queued("kworker/0:1H"), both);
    // If the same thread calls the driver, the second stack has all frames.
    assert_eq!(queued("CPU 0/TCG"), both[1..]);
}

#[test]
fn what_happens_is_counted_from_the_first_request_to_the_last() {
    let call = "raw_syscalls:sys_enter: NR 17 (4, 0, 1000, 0, 0, 0)";
    let switch = "sched:sched_switch: prev_comm=x prev_pid=495 ==> next_comm=y next_pid=1";
    let wakeup = "sched:sched_wakeup: comm=a pid=9 name pid=496 prio=120 target_cpu=000";
    let read = |time, sector| issue(495, time, &format!("254,0 R 4096 () {sector} + 8 [fio]"));
    let text = [
        fork(495, 495, 490),
        fork(495, 496, 495),
        event(495, 0.9, call),
        read(1.0, 8),
        event(495, 1.1, call),
        event(495, 1.2, call),
        event(495, 1.2, switch),
        // A wake-up counts for the woken thread, even if perf is the waker. perf's calls do not
        // count.
        event(0, 1.3, wakeup).replace("CPU 0/TCG", "perf"),
        event(495, 1.3, call).replace("CPU 0/TCG", "perf"),
        // Events of other processes do not count.
        event(700, 1.3, call),
        event(700, 1.3, switch),
        event(495, 1.3, &wakeup.replace("496", "701")),
        read(1.4, 16),
        event(495, 1.4, call),
        read(1.5, 24),
        event(495, 1.6, call),
    ];
    let (_, between) = trace(Of::Block, &text.concat());
    let told: Vec<_> = between
        .iter()
        .map(|one| (one.what, one.per_request))
        .collect();
    let wanted = [
        (Crossing::Switches, 0.5),
        (Crossing::WakeUps, 0.5),
        (Crossing::Calls, 1.5),
    ];
    assert_eq!(told, wanted);
    // With a single request, there is nothing in between.
    let (devices, between) = trace(Of::Block, &[fork(495, 495, 490), read(1.0, 8)].concat());
    assert_eq!((devices.len(), between.len()), (1, 0));
}

#[test]
fn packets_are_told_by_their_length_and_strays_are_left_out() {
    let sent = |device: &str, length: u32| {
        format!(
            "iperf3 490/490 1.0: net:net_dev_start_xmit: dev={device} queue_mapping=0 \
             skbaddr=0xff vlan_tagged=0 len={length} data_len=0\n{FRAMES}"
        )
    };
    let text = [
        sent("lo", 106),
        sent("eth0", 106).repeat(20),
        sent("eth0", 66).repeat(50),
        sent("port2", 106).repeat(19),
    ];
    let (devices, _) = trace(Of::Packet, &text.concat());
    let told: Vec<_> = { devices.iter() }
        .map(|one| (one.device.as_str(), one.requests, one.device_ns))
        .collect();
    assert_eq!(told, [("eth0", 20, None), ("port2", 19, None)]);
}

#[test]
fn garbage_is_survived_and_bounded() {
    let deep = "\tffffffff81b04c5f f ([kernel.kallsyms])\n".repeat(10_000);
    let many: String = (0..10_000)
        .map(|i| issue(490, 1.0, &format!("{i},0 R 4096 () {i} + 8 [fio]")))
        .collect();
    let text = [
        "PERF_RECORD_FORK\n 1/1 x: PERF_RECORD_FORK((:):(\n".to_owned(),
        // Each is the parent of the other.
        fork(5, 5, 6),
        fork(6, 6, 5),
        issue(5, 1.0, "254,0 R 4096 () 8 + 8 [fio]"),
        issue(490, 1.0, "254,0 R"),
        issue(490, 1.0, ""),
        event(490, 1.0, "block:block_rq_complete:"),
        event(490, 1.0, "sched:sched_wakeup: comm=a pid="),
        format!("a b 490/490 nan: block:block_rq_issue: 9,9 R 4096 () 1 + 8 [x]\n{deep}"),
        "\u{0}\u{1b}[2J".repeat(10_000),
        many,
    ];
    let (devices, between) = trace(Of::Block, &text.concat());
    assert_eq!(devices.len(), MOST_DEVICES);
    assert!(devices[0].stacks[0].frames.len() <= MOST_FRAMES);
    let times = devices.iter().filter_map(|one| one.device_ns);
    assert!(
        times
            .chain(between.iter().map(|one| one.per_request))
            .all(f64::is_finite)
    );
}
