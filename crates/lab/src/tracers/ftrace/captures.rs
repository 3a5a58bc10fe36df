//! Tests real traces against the kernel's own text of the same events, and against damage.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use fathom_run::{Event, Kind, Stream};
use proptest::prelude::*;

use super::pages::{CpuPages, Selection, Written, write};
use super::plan::{Plan, Source, Symbols};
use super::text::{Line, TextReader, events as text_events};
use super::{Format, Layout};
use crate::tracers::{block, kvm, syscalls};

const ALL: Selection = Selection {
    kept: 0..=u64::MAX,
    dropped: 0,
};

/// A capture in tests/data/ftrace, read with the collectors' own tables.
struct Capture {
    dir: PathBuf,
    plan: Plan,
    text: TextReader,
    /// Events whose text lacks a field that is needed.
    untold: Vec<String>,
    functions: Vec<(String, Kind)>,
}

impl Capture {
    fn open(name: &str, events: &[(&str, Kind, &[Source])]) -> Capture {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/ftrace");
        let mut capture = Capture {
            dir: data.join(name),
            plan: Plan::default(),
            text: TextReader::default(),
            untold: Vec::new(),
            functions: Vec::new(),
        };
        for (event, kind, args) in events {
            let file = format!("{}.format", event.replace('/', "."));
            if !capture.dir.join(&file).exists() {
                continue;
            }
            let format = Format::parse(&capture.read(&file)).unwrap();
            capture.plan.add(&format, *kind, args).unwrap();
            let needed: Vec<_> = args.iter().filter_map(|arg| arg.needed(&format)).collect();
            if capture.text.add(&format, &needed).is_err() {
                capture.untold.push(format.name);
            }
        }
        capture
    }

    fn host() -> Capture {
        let mut events = [kvm::EVENTS, block::EVENTS].concat();
        events.push(("raw_syscalls/sys_enter", Kind::SysEnter, syscalls::ENTER));
        events.push(("raw_syscalls/sys_exit", Kind::SysExit, syscalls::EXIT));
        events.push(("sched/sched_switch", Kind::SchedSwitch, syscalls::SWITCH));
        Capture::open("host", &events)
    }

    fn guest() -> Capture {
        const VQ: &[Source] = &[Source::Field("vq")];
        let irq = [Source::Field("irq")];
        let hctx = [Source::Field("hctx"), Source::Nothing];
        let interrupt = [Source::Field("irq"), Source::Field("vq")];
        let mut events = block::EVENTS.to_vec();
        events.push(("cap/virtio_queue_rq", Kind::VirtioQueueRq, &hctx));
        events.push(("cap/virtqueue_notify", Kind::VirtqueueNotify, VQ));
        events.push(("cap/vp_notify", Kind::VpNotify, VQ));
        events.push(("cap/vring_interrupt", Kind::VringInterrupt, &interrupt));
        events.push(("irq/irq_handler_entry", Kind::IrqHandlerEntry, &irq));
        let mut capture = Capture::open("guest", &events);
        // Function tracer: a call of the function is an event of this kind.
        capture.functions = vec![("virtblk_done".into(), Kind::VirtblkDone)];
        let kind_of = |name: &str| (name == "virtblk_done").then_some(Kind::VirtblkDone);
        let symbols = Symbols::parse(&capture.read("kallsyms"), kind_of);
        let format = Format::parse(&capture.read("ftrace.function.format")).unwrap();
        capture.plan.add_functions(&format, symbols).unwrap();
        capture
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.dir.join(file)).unwrap()
    }

    fn layout(&self) -> Layout {
        Layout::parse(&self.read("header_page")).unwrap()
    }

    fn pages(&self) -> Vec<u8> {
        fs::read(self.dir.join("pages")).unwrap()
    }

    fn decode(&self, bytes: &[u8]) -> (Vec<Event>, Written) {
        let layout = self.layout();
        let mut cpu = CpuPages::new(0);
        for page in bytes.chunks(layout.page) {
            cpu.push(page, &layout);
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.events");
        let written = write(&[cpu], &self.plan, &layout, &ALL, &path).unwrap();
        let stream = Stream::open(&path).unwrap();
        (stream.map(Result::unwrap).collect(), written)
    }

    fn lines(&self) -> Vec<String> {
        let text = self.read("trace.txt");
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(str::to_owned).collect()
    }
}

fn counts(events: &[Event]) -> BTreeMap<Kind, usize> {
    let mut counts = BTreeMap::new();
    for event in events {
        *counts.entry(event.kind).or_default() += 1;
    }
    counts
}

/// Asserts that each event from the pages equals the event that the kernel printed, with all
/// arguments. Kinds whose text lacks a field are skipped.
fn agree(capture: &Capture) -> Vec<Event> {
    let (events, written) = capture.decode(&capture.pages());
    assert_eq!(
        (written.damaged, written.disorder, written.missed),
        (0, 0, 0)
    );
    let trace = capture.read("trace.txt");
    let said = text_events(&capture.text, &capture.plan, &capture.functions, &trace);
    assert_eq!(said.damaged, 0);
    let told = counts(&said.events);
    let of_told: Vec<Event> = events
        .iter()
        .copied()
        .filter(|event| told.contains_key(&event.kind))
        .collect();
    assert_eq!(of_told.len(), said.events.len());
    for (decoded, printed) in of_told.iter().zip(&said.events) {
        assert_eq!(decoded, printed);
    }
    events
}

#[test]
fn the_hosts_pages_say_what_the_kernel_printed() {
    let capture = Capture::host();
    let events = agree(&capture);
    let lines = capture.lines();
    assert_eq!(events.len(), lines.len());
    // The text of these events cannot be converted back, so the expected text comes from the
    // events.
    let mut untold = capture.untold.clone();
    untold.sort();
    assert_eq!(
        untold,
        ["kvm_msi_set_irq", "kvm_userspace_exit", "sched_switch"]
    );
    for (event, line) in events.iter().zip(&lines) {
        let line = Line::parse(line).unwrap();
        assert_eq!(
            (event.time, event.tid, event.cpu),
            (line.time, line.tid, line.cpu)
        );
        assert_eq!(event.kind.name(), line.event);
        let body = line.body.unwrap();
        match event.kind {
            Kind::KvmMsiSetIrq => {
                assert!(body.starts_with(&format!("dst 0 vec {} (", event.args[1] & 0xff)));
                assert_eq!(event.args[0], 0xfee0_0000);
            }
            Kind::SchedSwitch => {
                assert!(
                    body.contains(&format!("prev_pid={} ", event.args[0])),
                    "{body}"
                );
                assert!(
                    body.contains(&format!("next_pid={} ", event.args[2])),
                    "{body}"
                );
                let is_running = body.contains("prev_state=R");
                assert_eq!(event.args[1] & 0xff == 0, is_running, "{body}");
            }
            _ => {}
        }
    }
    let counts = counts(&events);
    assert_eq!(
        (counts[&Kind::KvmMmio], counts[&Kind::KvmMsiSetIrq]),
        (20, 19)
    );
    assert_eq!((counts[&Kind::KvmExit], counts[&Kind::SysEnter]), (56, 123));
}

#[test]
fn the_guests_pages_say_what_the_kernel_printed() {
    let capture = Capture::guest();
    let events = agree(&capture);
    assert_eq!(capture.untold, [""; 0]);
    let counts = counts(&events);
    for (kind, count) in [
        (Kind::BlockRqIssue, 26),
        (Kind::VirtioQueueRq, 26),
        (Kind::VirtqueueNotify, 26),
        (Kind::VpNotify, 28),
        (Kind::VringInterrupt, 88),
        (Kind::VirtblkDone, 25),
        (Kind::IrqHandlerEntry, 26),
    ] {
        assert_eq!(counts[&kind], count, "{}", kind.name());
    }
    // The interrupt of the queue that was kicked called the handler.
    let handled = events
        .iter()
        .find(|event| event.kind == Kind::IrqHandlerEntry);
    let irq = handled.unwrap().args[0];
    let of_irq = |event: &&Event| event.kind == Kind::VringInterrupt && event.args[0] == irq;
    let vq = events.iter().find(of_irq).unwrap().args[1];
    assert!(
        events
            .iter()
            .any(|event| event.kind == Kind::VpNotify && event.args[0] == vq)
    );
}

#[test]
fn only_what_was_asked_for_is_kept() {
    let capture = Capture::host();
    let (all, _) = capture.decode(&capture.pages());
    let layout = capture.layout();
    let mut cpu = CpuPages::new(3);
    for page in capture.pages().chunks(layout.page) {
        cpu.push(page, &layout);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.events");
    let what = Selection {
        kept: all[10].time..=all[20].time,
        dropped: 5,
    };
    let other = CpuPages::new(4);
    let written = write(&[other, cpu], &capture.plan, &layout, &what, &path).unwrap();
    let events: Vec<Event> = Stream::open(&path).unwrap().map(Result::unwrap).collect();
    assert_eq!(written.events as usize, events.len());
    let lost = events.last().unwrap();
    assert_eq!((lost.kind, lost.args[0]), (Kind::Lost, 5));
    assert_eq!(events.len(), 12);
    assert!(events[..11].iter().all(|event| event.cpu == 3));
}

/// Events of two CPUs are merged by time. Pages in the wrong order are detected and sorted.
#[test]
fn cpus_are_merged_and_disorder_is_told() {
    let capture = Capture::host();
    let layout = capture.layout();
    let pages = capture.pages();
    let pages: Vec<&[u8]> = pages.chunks(layout.page).collect();
    let (all, _) = capture.decode(&capture.pages());
    let of = |cpu, numbers: &[usize]| {
        let mut of = CpuPages::new(cpu);
        for &number in numbers {
            of.push(pages[number], &layout);
        }
        of
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.events");
    for (first, second, is_ordered) in [
        (of(0, &[0, 2, 4, 6]), of(1, &[1, 3, 5]), true),
        (of(0, &[4, 2, 0, 6]), of(1, &[1, 3, 5]), false),
    ] {
        let written = write(&[first, second], &capture.plan, &layout, &ALL, &path).unwrap();
        assert_eq!(written.disorder == 0, is_ordered);
        let events = Stream::open(&path).unwrap().map(Result::unwrap);
        let times: Vec<u64> = events.map(|event| event.time).collect();
        assert_eq!(
            times,
            all.iter().map(|event| event.time).collect::<Vec<_>>()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Damaged pages produce events or a count of damage, never more events than fit into the
    /// pages.
    #[test]
    fn damaged_pages_are_survived(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        cut in any::<prop::sample::Index>(),
    ) {
        let capture = Capture::host();
        let mut bytes = capture.pages();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(cut.index(bytes.len()) + 1);
        let (events, _) = capture.decode(&bytes);
        prop_assert!(events.len() <= bytes.len() / 4 + 7);
    }

    #[test]
    fn damaged_text_is_survived(
        at in any::<prop::sample::Index>(), letter in "[ -~]{0,3}", line in any::<prop::sample::Index>(),
    ) {
        let capture = Capture::guest();
        let mut lines = capture.lines();
        let line = line.index(lines.len());
        let at = at.index(lines[line].len());
        lines[line].replace_range(at..=at, &letter);
        let text = lines.join("\n");
        let said = text_events(&capture.text, &capture.plan, &capture.functions, &text);
        prop_assert!(said.events.len() <= lines.len());
    }
}
