use super::*;
use crate::memory::{Buffer, Mapping, PAGE};
use crate::report::{Outcome, Report};

/// A port that completes a number of requests at once, and the next one only after the window.
struct Stalling<'a> {
    control: &'a Control,
    memory: Mapping,
    /// Number of requests to complete before the stall.
    quick: u64,
    queued: Option<u16>,
    is_over: bool,
}

impl Port for Stalling<'_> {
    fn buffer(&self, _slot: u16) -> Buffer {
        // SAFETY: the mapping is a page, and the port is dropped after the last use of the buffer.
        unsafe { Buffer::new(self.memory.base(), PAGE) }
    }

    fn queue(&mut self, slot: u16, _op: Op, _offset: u64) {
        self.queued = Some(slot);
    }

    fn submit(&mut self) -> Result<()> {
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        if self.quick == 0 && !self.is_over {
            return Ok(());
        }
        if let Some(slot) = self.queued.take() {
            self.quick = self.quick.saturating_sub(1);
            done.push(Done { slot, status: 0 });
        }
        Ok(())
    }

    /// The first call during the stall ends the window, and the second one ends the stall.
    fn wait(&mut self) -> Result<()> {
        self.is_over = self.control.phase() == Phase::Stop;
        self.control.set_phase(Phase::Stop);
        Ok(())
    }

    fn counters(&mut self) -> Counters {
        Counters::default()
    }

    fn describe_status(&self, _status: i32) -> String {
        String::new()
    }
}

/// Runs a load whose last request completes after the window, after `quick` other requests.
fn stalled(quick: u64) -> Measured {
    let load = Load {
        rw: crate::Rw::RandRead,
        ..Load::default()
    };
    let control = Control::new(1);
    control.set_phase(Phase::Measure);
    let port = Stalling {
        control: &control,
        memory: Mapping::anonymous(PAGE).unwrap(),
        quick,
        queued: None,
        is_over: false,
    };
    let range = Range {
        first: 0,
        count: 10,
    };
    Worker::new(port, Nobody, 0, range, &load, &control, None)
        .run()
        .unwrap()
}

#[test]
fn request_in_flight_at_the_end_counts_in_latencies() {
    let measured = stalled(3);
    let reads = &measured.latency[Op::Read as usize];
    assert_eq!(measured.in_window[Op::Read as usize], 3);
    assert_eq!(measured.in_flight_at_end, 1);
    assert_eq!(reads.count(), 4, "the stalled request is one of them");
    assert!(measured.oldest_in_flight > 0);
    assert!(reads.max() >= measured.oldest_in_flight);
    assert_eq!(measured.completed, 4);
}

#[test]
fn report_has_a_row_for_requests_that_all_stalled() {
    let options = crate::Options {
        target: crate::Target::File(crate::File::new("/nowhere")),
        load: Load::default(),
    };
    let outcome = |measured| Outcome {
        measured: vec![measured],
        ns_per_tick: 2.0,
        backend_cpu_ns: None,
    };
    let measured = stalled(0);
    let oldest = measured.oldest_in_flight as f64 * 2.0;
    let report = Report::new(&options, &outcome(measured), None);
    let read = report.operation(Op::Read).unwrap();
    assert_eq!((read.ios, read.iops), (0, 0.0));
    assert!(read.latency.max_ns >= oldest && oldest > 0.0);
    assert_eq!(report.in_flight_at_end, 1);
    assert_eq!(report.oldest_in_flight_ns, Some(oldest));
    let text = report.to_string();
    assert!(
        text.contains("in flight at the end: 1, the oldest for "),
        "{text}"
    );
    // A single request has no percentiles, and the table has dashes for them.
    assert_eq!(read.latency.p999_ns, None);
    let row = text.lines().find(|line| line.starts_with("read")).unwrap();
    assert_eq!(row.matches(" - ").count(), 4, "{text}");
    let json = serde_json::to_value(&report).unwrap();
    assert!(json["operations"][0]["latency"]["p999_ns"].is_null());
    assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
}
