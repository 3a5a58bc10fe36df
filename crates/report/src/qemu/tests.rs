use super::*;

const THREADS: [&str; 6] = [
    "virtio_queue_notify",
    "virtio_blk_handle_read",
    "thread_pool_submit",
    "thread_pool_complete",
    "virtio_blk_rw_complete",
    "virtio_notify_irqfd",
];

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn event(name: u64, args: &[u64]) -> Event {
    let mut all = vec![name];
    all.extend(args);
    Event::new(0, Kind::Qemu, 0, 9, &all)
}

/// Adds one request through the thread pool, with the lengths of its steps in ns.
fn request(steps: &mut Steps, time: &mut i64, device: u64, request: u64, lengths: [i64; 5]) {
    let events = [
        event(0, &[device, 0, 1]),
        event(2, &[1, request + 100, 2]),
        event(3, &[1, request + 100, 2, 0]),
        event(4, &[device, request, 0]),
        event(5, &[device, 1]),
    ];
    for (number, (event, length)) in events.into_iter().zip(lengths).enumerate() {
        *time += length;
        steps.add(*time, &event);
        if number == 0 {
            steps.add(*time, &super::tests::event(1, &[device, request, 0, 8]));
        }
    }
}

#[test]
fn the_wikis_table_is_made_as_the_wiki_made_it() {
    let mut steps = Steps::new(&strings(&THREADS));
    let mut time = 0;
    // The wiki's figures for aio=threads, in ns.
    for _ in 0..1000 {
        request(
            &mut steps,
            &mut time,
            7,
            8,
            [45_292, 8_023, 145_689, 260, 1_034],
        );
    }
    let (rows, notes) = steps.finish(Some((9, 2)));
    assert!(notes.is_empty());
    let shown: Vec<_> = rows
        .iter()
        .map(|row| {
            (
                row.wiki.as_str(),
                row.today.as_str(),
                row.time.mean,
                row.time.count,
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            ("virtio_queue_notify", "virtio_queue_notify", 45_292.0, 999),
            ("paio_submit", "thread_pool_submit", 8_023.0, 1000),
            ("posix_aio_read", "return of ppoll()", 0.0, 0),
            (
                "posix_aio_process_queue",
                "thread_pool_complete",
                145_689.0,
                1000
            ),
            (
                "virtio_blk_rw_complete",
                "virtio_blk_rw_complete",
                260.0,
                1000
            ),
            ("virtio_notify", "virtio_notify_irqfd", 1_034.0, 1000),
        ]
    );
    let sum: f64 = rows.iter().map(|row| row.time.mean).sum();
    assert_eq!(sum, 200_298.0, "the latency of a request");
}

#[test]
fn without_events_of_the_engine_their_time_is_in_the_next_row() {
    let mut steps = Steps::new(&strings(&[
        "virtio_queue_notify",
        "virtio_blk_handle_read",
        "virtio_blk_rw_complete",
        "virtio_notify",
    ]));
    for time in [0, 1000] {
        steps.add(time, &event(0, &[7, 0, 1]));
        steps.add(time + 1, &event(1, &[7, 8, 0, 8]));
        steps.add(time + 150, &event(2, &[7, 8, 0]));
        steps.add(time + 151, &event(3, &[7, 1]));
    }
    let (rows, _) = steps.finish(Some((10, 0)));
    let shown: Vec<_> = rows
        .iter()
        .map(|row| (row.wiki.as_str(), row.today.as_str(), row.time.mean))
        .collect();
    assert_eq!(
        shown,
        [
            ("virtio_queue_notify", "virtio_queue_notify", 849.0),
            ("laio_submit", "io_submit()", 0.0),
            ("qemu_laio_completion_cb", "read()", 0.0),
            ("qemu_laio_enqueue_completed", "none", 0.0),
            ("virtio_blk_rw_complete", "virtio_blk_rw_complete", 150.0),
            ("virtio_notify", "virtio_notify", 1.0),
        ]
    );
}

#[test]
fn io_uring_is_followed_by_both_of_its_layouts() {
    let old = ([1, 2, 55], [2, 55, 4096], "luring_process_completion");
    let new = ([1, 55, 14], [55, 4096, 0], "luring_cqe_handler");
    for (submit, complete, name) in [old, new] {
        let mut names = THREADS;
        (names[2], names[3]) = ("luring_co_submit", name);
        let mut steps = Steps::new(&strings(&names));
        for (time, event) in [
            (0, event(0, &[7, 0, 1])),
            (1, event(1, &[7, 8, 0, 8])),
            (5, event(2, &submit)),
            (50, event(3, &complete)),
            (60, event(4, &[7, 8, 0])),
            (70, event(5, &[7, 1])),
        ] {
            steps.add(time, &event);
        }
        let (rows, _) = steps.finish(None);
        let means: Vec<f64> = rows.iter().map(|row| row.time.mean).collect();
        assert_eq!(means, [0.0, 5.0, 45.0, 10.0, 10.0], "{name}");
        assert_eq!(rows[2].today, name);
    }
}

#[test]
fn batches_are_told_apart_by_request_and_their_submits_are_not() {
    let mut steps = Steps::new(&strings(&THREADS));
    steps.add(0, &event(0, &[7, 0, 1]));
    for request in [10, 11, 12] {
        steps.add(1, &event(1, &[7, request, 0, 8]));
    }
    steps.add(5, &event(2, &[1, 100, 0]));
    steps.add(90, &event(3, &[1, 100, 0, 0]));
    for (time, request) in [(100, 12), (101, 10), (102, 11)] {
        steps.add(time, &event(4, &[7, request, 0]));
    }
    steps.add(110, &event(5, &[7, 1]));
    let (rows, notes) = steps.finish(None);
    let counts: Vec<u64> = rows.iter().map(|row| row.time.count).collect();
    assert_eq!(counts, [0, 0, 0, 0, 0, 3]);
    assert_eq!((rows[5].time.min, rows[5].time.max), (8, 10));
    assert!(
        notes[0].contains("3 requests were submitted together"),
        "{notes:?}"
    );
}

#[test]
fn missing_events_make_no_long_steps_and_other_devices_no_rows() {
    let mut steps = Steps::new(&strings(&THREADS));
    let mut time = 0;
    for number in 0..20 {
        request(&mut steps, &mut time, 7, 8, [10, 1, 100, 2, 3]);
        request(&mut steps, &mut time, 6, 8, [10, 1, 5000, 2, 3]);
        if number % 2 == 0 {
            // Twice as busy.
            request(&mut steps, &mut time, 7, 8, [10, 1, 100, 2, 3]);
        }
        if number % 5 == 0 {
            steps.add(time + 1, &event(0, &[7, 0, 1]));
            steps.add(time + 1, &event(1, &[7, 8, 0, 8]));
            steps.add(time + 2, &Event::new(0, Kind::Lost, 0, 0, &[1]));
            time += 1_000_000;
            steps.add(time, &event(4, &[7, 8, 0]));
            steps.add(time, &event(5, &[7, 1]));
        }
    }
    let (rows, _) = steps.finish(None);
    let complete = &rows[3].time;
    assert_eq!((complete.count, complete.min, complete.max), (30, 100, 100));
    assert!(rows[0].time.max < 100_000, "not over the gap");
}

#[test]
fn no_requests_are_no_table() {
    let steps = Steps::new(&strings(&THREADS));
    let (rows, notes) = steps.finish(None);
    assert!(rows.is_empty() && notes[0].contains("none is of a request"));
    let mut steps = Steps::new(&strings(&THREADS));
    steps.add(0, &event(1, &[7, 8, 0, 8]));
    let (rows, notes) = steps.finish(None);
    assert!(rows.is_empty() && notes[0].contains("no request was seen"));
}
