//! Tests whole files: logs of a real QEMU 10.0 (a guest reading 4 KiB blocks from virtio-blk with
//! an I/O thread), and generated binary traces. The latter follow the layout of QEMU's
//! trace/simple.c, because distributions do not build that backend.

use std::path::{Path, PathBuf};

use fathom_run::{Event, Kind, Stream};
use proptest::prelude::*;

use super::schema::Schema;
use super::{log, simple};
use crate::error::Result;

const THREADS: &str = include_str!("../../../tests/data/qemu/threads-10.0.log");
const NATIVE: &str = include_str!("../../../tests/data/qemu/native-10.0.log");
const IO_URING: &str = include_str!("../../../tests/data/qemu/io_uring-10.0.log");
const MUTEXES: &str = include_str!("../../../tests/data/qemu/mutexes-10.0.log");

struct Outcome {
    strings: Vec<String>,
    events: Vec<Event>,
    converted: super::Converted,
}

impl Outcome {
    fn named(&self, name: &str) -> Vec<&Event> {
        let index = self.strings.iter().position(|string| string == name);
        let index = index.map_or(u64::MAX, |index| index as u64);
        let wanted = |e: &&Event| e.kind == Kind::Qemu && e.args[0] == index;
        self.events.iter().filter(wanted).collect()
    }

    fn lost(&self) -> u64 {
        let lost = self.events.iter().filter(|e| e.kind == Kind::Lost);
        lost.map(|e| e.args[0]).sum()
    }
}

fn read(stream: &Path, converted: super::Converted) -> Outcome {
    let mut stream = Stream::open(stream).unwrap();
    let mut events = Vec::new();
    while let Some(event) = stream.next_event().unwrap() {
        events.push(event);
    }
    assert_eq!(events.len() as u64, converted.events);
    Outcome {
        strings: stream.header().strings.clone(),
        events,
        converted,
    }
}

fn files(bytes: &[u8]) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (input, stream) = (dir.path().join("trace"), dir.path().join("qemu.events"));
    std::fs::write(&input, bytes).unwrap();
    (dir, input, stream)
}

fn convert_log(bytes: &[u8]) -> Result<Outcome> {
    let (_dir, input, stream) = files(bytes);
    let converted = log::convert(&input, &stream)?;
    Ok(read(&stream, converted))
}

fn refusal(result: Result<Outcome>) -> String {
    result.err().expect("it is refused").to_string()
}

#[test]
fn a_real_log_becomes_a_stream() {
    for (text, submit, complete) in [
        (
            THREADS,
            "thread_pool_submit_aio",
            "thread_pool_complete_aio",
        ),
        (IO_URING, "luring_co_submit", "luring_process_completion"),
    ] {
        let outcome = convert_log(text.as_bytes()).unwrap();
        assert!(outcome.converted.problems.is_empty());
        assert_eq!(outcome.events.len(), text.lines().count());
        for name in [
            "virtio_blk_handle_read",
            submit,
            complete,
            "virtio_notify_irqfd",
        ] {
            let expected = text
                .lines()
                .filter(|line| line.contains(&format!(":{name} ")));
            assert_eq!(outcome.named(name).len(), expected.count(), "{name}");
        }
    }
    assert!(
        convert_log(NATIVE.as_bytes())
            .unwrap()
            .named("virtio_blk_rw_complete")
            .len()
            > 3
    );
}

#[test]
fn arguments_are_those_of_the_line() {
    let outcome = convert_log(THREADS.as_bytes()).unwrap();
    let line = THREADS
        .lines()
        .find(|line| line.contains("_handle_read "))
        .unwrap();
    let event = outcome.named("virtio_blk_handle_read")[0];
    let words: Vec<&str> = line.split(' ').collect();
    let hex = |at: usize| u64::from_str_radix(&words[at][2..], 16).unwrap();
    assert_eq!(event.args[1..3], [hex(2), hex(4)]);
    assert_eq!(event.args[3].to_string(), words[6]);
    assert_eq!(event.args[4], 8);
    let (prefix, _) = words[0].split_once(':').unwrap();
    let seconds = event.time as f64 / 1e9;
    assert!(prefix.starts_with(&event.tid.to_string()));
    assert!(prefix.contains(&format!("@{}.", seconds as u64)));
}

#[test]
fn threads_that_overtook_each_other_are_put_in_order() {
    let stamps: Vec<&str> = MUTEXES
        .lines()
        .map(|line| line.split(['@', ':']).nth(1).unwrap())
        .collect();
    assert!(!stamps.is_sorted(), "the capture is out of order");
    let outcome = convert_log(MUTEXES.as_bytes()).unwrap();
    assert!(outcome.events.is_sorted_by_key(|event| event.time));
    assert_eq!(outcome.events.len(), stamps.len());
    assert!(outcome.converted.problems.is_empty());
    let locked = outcome.named("qemu_mutex_locked");
    let pool = locked.iter().find(|event| {
        outcome.strings[usize::try_from(event.args[3]).unwrap()] == "util/thread-pool.c"
    });
    let [_, address, line, ..] = pool.unwrap().args;
    assert!(MUTEXES.contains(&format!("mutex {address:#x} (util/thread-pool.c:{line})")));
}

#[test]
fn garbled_lines_are_lost_events_and_said() {
    let lines: Vec<&str> = THREADS.lines().collect();
    let mut torn = lines.clone();
    let joined = format!("{}{}", &lines[20][..40], lines[21]);
    torn.splice(20..22, [joined.as_str()]);
    let short = &lines[30][..lines[30].rfind(' ').unwrap()];
    torn[29] = short;
    let mut bytes = torn.join("\n").into_bytes();
    bytes.extend(b"\n\xff\xfe\n");
    bytes.extend(vec![b'x'; 10_000]);
    bytes.extend(b"\nguest error: whatever\n1806@17952");
    let outcome = convert_log(&bytes).unwrap();
    assert_eq!((outcome.lost(), outcome.converted.lost), (4, 4));
    let [garbled, cut] = &outcome.converted.problems[..] else {
        panic!("{:?}", outcome.converted.problems);
    };
    assert!(
        garbled.contains("4 of") && garbled.contains("line 21"),
        "{garbled}"
    );
    assert!(cut.contains("cut off"));
    assert_eq!(outcome.events.len(), lines.len() - 3 + 4);
}

#[test]
fn what_cannot_be_a_table_is_refused() {
    let refused = |text: &str| refusal(convert_log(text.as_bytes()));
    let bare: String = THREADS
        .lines()
        .map(|line| line.split_once(':').unwrap().1.to_owned() + "\n")
        .collect();
    assert!(refused(&bare).contains("-msg timestamp=on"));
    assert!(refused("").contains("no trace events"));
    assert!(refused("qemu: hello\n").contains("-trace help"));
    assert!(refusal(convert_log(&[0; 100_000])).contains("no trace events"));
    // More than the sorting window apart.
    let line = |at: u64| format!("1@{}.{:06}:virtio_notify vdev 0x1 vq 0x2\n", 100, at);
    let mut text: String = (0..70_000u64).map(|at| line(100_000 + at)).collect();
    text += &line(5);
    assert!(refused(&text).contains("go back by"), "{}", refused(&text));
    // A single damaged digit with a far-off time costs one line, not the rest of the log.
    let far = "1@999999999.000001:virtio_notify vdev 0x1 vq 0x2\n";
    let outcome = convert_log(format!("{}{far}{}", line(1), line(2)).as_bytes()).unwrap();
    assert_eq!(
        (outcome.named("virtio_notify").len(), outcome.lost()),
        (2, 1)
    );
}

/// Writes like QEMU's simple backend, by format version.
struct Writer {
    version: u64,
    bytes: Vec<u8>,
}

impl Writer {
    fn new(version: u64) -> Writer {
        let header = [u64::MAX, 0xf2b1_77cb_0aa4_29b4, version];
        let bytes = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut writer = Writer { version, bytes };
        if version >= 4 {
            for (id, name) in NAMES.iter().enumerate() {
                writer.word(0);
                // The numbers belong to the process, not to the file.
                writer.word(100 + id as u64);
                writer.bytes.extend((name.len() as u32).to_ne_bytes());
                writer.bytes.extend(name.as_bytes());
            }
        }
        writer
    }

    fn word(&mut self, word: u64) {
        self.bytes.extend(word.to_ne_bytes());
    }

    fn event(&mut self, id: u64, time: u64, payload: &[u8]) {
        if self.version >= 4 {
            self.word(1);
        }
        let id = match id {
            DROPPED => id,
            id if self.version >= 4 => 100 + id,
            id => id,
        };
        self.word(id);
        self.word(time);
        self.bytes.extend((24 + payload.len() as u32).to_ne_bytes());
        let pid: u32 = if self.version > 2 { 77 } else { 0 };
        self.bytes.extend(pid.to_ne_bytes());
        self.bytes.extend(payload);
    }
}

const DROPPED: u64 = u64::MAX - 1;
const NAMES: [&str; 3] = ["other", "virtqueue_pop", "qemu_mutex_lock"];
const EVENTS: &str = "other(void) \"\"\n\
    virtqueue_pop(void *vq, void *elem, unsigned int in_num, unsigned int out_num) \"\"\n\
    qemu_mutex_lock(void *mutex, const char *file, const int line) \"%p\"\n";

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn sample(version: u64) -> Vec<u8> {
    let mut writer = Writer::new(version);
    writer.event(1, 1000, &words(&[0xaa, 0xbb, 2, 1]));
    // A thread that took its timestamp earlier.
    writer.event(0, 900, &[]);
    let mut mutex = words(&[0xcc]);
    mutex.extend(6u32.to_ne_bytes());
    mutex.extend(b"io/a.c");
    mutex.extend(words(&[91]));
    writer.event(2, 1100, &mutex);
    writer.event(DROPPED, 1200, &words(&[5]));
    writer.event(1, 1300, &words(&[0xaa, 0xbb, 1, 1]));
    writer.bytes
}

fn convert_simple(bytes: &[u8], schema: &str) -> Result<Outcome> {
    let (_dir, input, stream) = files(bytes);
    let converted = simple::convert(&input, &Schema::parse(schema).unwrap(), &stream)?;
    Ok(read(&stream, converted))
}

#[test]
fn all_formats_of_the_simple_backend_are_read() {
    for version in [2, 3, 4] {
        let outcome = convert_simple(&sample(version), EVENTS).unwrap();
        let times: Vec<u64> = outcome.events.iter().map(|event| event.time).collect();
        assert_eq!(times, [900, 1000, 1100, 1200, 1300], "format {version}");
        let pops = outcome.named("virtqueue_pop");
        assert_eq!(pops[0].args[1..5], [0xaa, 0xbb, 2, 1]);
        assert_eq!(pops.len(), 2);
        let lock = outcome.named("qemu_mutex_lock")[0];
        assert_eq!(lock.args[1..3], [0xcc, 91]);
        assert_eq!(
            outcome.strings[usize::try_from(lock.args[3]).unwrap()],
            "io/a.c"
        );
        assert_eq!((outcome.lost(), outcome.converted.lost), (5, 5));
        assert!(outcome.converted.problems[0].contains("dropped 5 events"));
    }
}

#[test]
fn a_trace_and_another_builds_events_are_refused() {
    let other = EVENTS.replace(", unsigned int out_num", "");
    for version in [2, 3, 4] {
        let refused = refusal(convert_simple(&sample(version), &other));
        assert!(
            refused.contains("trace-events-all of the same build"),
            "{refused}"
        );
    }
    // Before format 4, an event's number is its position in the file.
    let shifted = format!("new(int a) \"\"\n{EVENTS}");
    assert!(refusal(convert_simple(&sample(3), &shifted)).contains("same build"));
    assert_eq!(
        convert_simple(&sample(4), &shifted).unwrap().events.len(),
        5
    );
    // In format 4, an event whose name is not in the file is still an event.
    let fewer = EVENTS.replace("virtqueue_pop", "something_else");
    let outcome = convert_simple(&sample(4), &fewer).unwrap();
    assert_eq!(outcome.named("virtqueue_pop").len(), 2);
    assert!(outcome.converted.problems[1].contains("virtqueue_pop"));
}

#[test]
fn what_is_no_trace_is_said() {
    let refused = |bytes: &[u8]| refusal(convert_simple(bytes, EVENTS));
    assert!(refused(b"").contains("not a trace of QEMU's simple backend"));
    assert!(refused(THREADS.as_bytes()).contains("not a trace of QEMU's simple backend"));
    assert!(refused(&Writer::new(0).bytes).contains("before 1.3"));
    assert!(refused(&Writer::new(5).bytes).contains("newer than this fathom"));
    assert!(refused(&Writer::new(4).bytes).contains("no events"));
    let mut swapped = Writer::new(4).bytes;
    swapped[8..16].reverse();
    assert!(refused(&swapped).contains("byte order"));
    let mut damaged = sample(4);
    let length = damaged.len();
    damaged[length - 56 + 16..length - 56 + 20].copy_from_slice(&7u32.to_ne_bytes());
    assert!(
        refused(&damaged).contains("a record of 7 bytes"),
        "{}",
        refused(&damaged)
    );
}

#[test]
fn a_cut_trace_is_read_to_its_cut() {
    let whole = sample(4);
    for missing in [1, 30, 57] {
        let outcome = convert_simple(&whole[..whole.len() - missing], EVENTS).unwrap();
        assert_eq!(outcome.named("virtqueue_pop").len(), 1);
        let problems = outcome.converted.problems;
        assert!(problems[0].contains("cut off"), "{missing}: {problems:?}");
    }
}

/// The installed build's file, with thousands of real declarations.
#[test]
fn a_real_trace_events_file_is_read() {
    let path = Path::new("/usr/share/qemu/trace-events-all");
    let schema = Schema::load(path).expect("QEMU is installed (make setup)");
    let read = schema.by_name("virtio_blk_handle_read").unwrap();
    assert_eq!(read.args, [super::schema::Arg::Number; 4]);
    let lock = schema.by_name("qemu_mutex_lock").unwrap();
    assert_eq!(lock.args[1], super::schema::Arg::Text);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_damaged_log_gives_no_event_that_was_not_there(
        at in 0usize..THREADS.len(),
        damage in proptest::collection::vec(any::<u8>(), 1..40),
    ) {
        let mut bytes = THREADS.as_bytes().to_vec();
        let end = (at + damage.len()).min(bytes.len());
        bytes.splice(at..end, damage);
        if let Ok(outcome) = convert_log(&bytes) {
            prop_assert!(outcome.events.is_sorted_by_key(|event| event.time));
            let lines = THREADS.lines().count();
            prop_assert!(outcome.events.len() <= lines + 40);
            for event in &outcome.events {
                prop_assert!(event.kind != Kind::Qemu || (event.args[0] as usize) < outcome.strings.len());
            }
        }
    }

    #[test]
    fn a_damaged_trace_is_refused_or_read(
        version in 2u64..=4,
        at in 0usize..200,
        damage in proptest::collection::vec(any::<u8>(), 1..40),
        keep in 0usize..400,
    ) {
        let mut bytes = sample(version);
        bytes.truncate(keep);
        let at = at.min(bytes.len());
        let end = (at + damage.len()).min(bytes.len());
        bytes.splice(at..end, damage);
        if let Ok(outcome) = convert_simple(&bytes, EVENTS) {
            prop_assert!(outcome.events.len() <= 10);
            prop_assert!(outcome.events.is_sorted_by_key(|event| event.time));
        }
    }
}
