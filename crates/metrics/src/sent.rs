//! Checks measurements that another process has sent. A guest may control its tenant's process, so
//! everything is checked before it becomes a part of a page with metrics of others.

use super::measured::{Measured, ProcessInfo};
use crate::untrusted::clean_text;
use fathom_trace::{HistogramsState, Op, SlowRequest, Stage};
use serde::Serialize;
use std::collections::BTreeSet;

/// Maximum number of workers, of queues and of a pool's threads.
const MAX_THREADS: usize = 256;
/// Maximum number of alarms and of filters.
const MAX_NAMED: usize = 4096;
/// Maximum number of batch sizes, which are powers of two.
const MAX_SIZES: usize = 63;
/// Maximum number of digits of a slow request's id.
const MAX_ID: usize = 16;
/// Maximum sum of a disk's counters; larger values could overflow in additions.
const MAX_COUNT: u64 = 1 << 62;

/// The measurements of all disks at one moment.
pub enum Measures {
    /// Measurements of this process.
    Own(Vec<Measured>),
    /// Messages of other processes. Parsing them takes long, so the control thread does not do it.
    OfTenants(Vec<Sent>),
}

impl Measures {
    /// Parses the messages of other processes. A disk with a malformed message is omitted.
    pub fn read(self) -> Vec<Measured> {
        let disks = match self {
            Measures::Own(disks) => return disks,
            Measures::OfTenants(disks) => disks.into_iter(),
        };
        let read = disks.filter_map(|sent| match sent.read() {
            Ok(measured) => Some(measured),
            Err(problem) => {
                let name = &sent.name;
                tracing::warn!(
                    "disk '{name}': the disk's process sent malformed metrics, so the disk has \
                     none: {problem}"
                );
                None
            }
        });
        read.collect()
    }
}

/// A message with a [`Measured`], and what the supervisor knows about its disk.
#[derive(Debug, Serialize)]
pub struct Sent {
    /// Name of the disk, as the supervisor knows it.
    pub name: String,
    /// ID of the process that serves the disk.
    pub pid: u32,
    /// Message as received from that process, which is not trusted.
    pub message: String,
    /// Extracts the measurements from the message. The error says why it has none.
    #[serde(skip)]
    pub parse: fn(&str) -> Result<Measured, String>,
}

impl Sent {
    /// Parses and checks the measurements. The error says which of them is wrong.
    pub fn read(&self) -> Result<Measured, String> {
        let mut measured = (self.parse)(&self.message)?;
        check_lengths(&measured)?;
        check_counts(&measured)?;
        measured.counts.slow.iter().try_for_each(check_slow)?;
        measured.info.name.clone_from(&self.name);
        measured.info.pid = self.pid;
        measured.process = ProcessInfo {
            pid: self.pid,
            ..measured.process
        };
        // In this order: different names may be equal when they are clean.
        clean_labels(&mut measured);
        make_unambiguous(&mut measured);
        Ok(measured)
    }
}

fn check_lengths(measured: &Measured) -> Result<(), String> {
    let (info, counts) = (&measured.info, &measured.counts);
    let all_workers = info.workers.iter().chain(&counts.workers);
    let sizes = all_workers.map(|worker| worker.batches.len()).max();
    for (what, len, most) in [
        ("workers", info.workers.len(), MAX_THREADS),
        ("workers", counts.workers.len(), MAX_THREADS),
        ("histograms", counts.histograms.len(), MAX_THREADS + 1),
        ("queues", measured.queues.len(), MAX_THREADS),
        (
            "threads of a pool",
            measured.pool_threads.len(),
            MAX_THREADS,
        ),
        ("sizes of batches", sizes.unwrap_or(0), MAX_SIZES),
        ("alarms", info.alarms.len(), MAX_NAMED),
        ("filters", info.filters.len(), MAX_NAMED),
        ("slow requests", counts.slow.len(), MAX_THREADS),
    ] {
        if len > most {
            return Err(format!("{len} {what} exceed the limit"));
        }
    }
    Ok(())
}

/// Checks that the sum of all counters is at most [`MAX_COUNT`].
fn check_counts(measured: &Measured) -> Result<(), String> {
    let histograms = { measured.counts.histograms.iter() }.flat_map(counts_of);
    let workers = measured.info.workers.iter().chain(&measured.counts.workers);
    let batches = workers.flat_map(|worker| worker.batches.iter().copied());
    let held = { measured.info.filters.iter() }.filter_map(|filter| filter.held_ns);
    let all = histograms.chain(batches).chain(held);
    let mut more = all.chain([measured.counts.refused, measured.in_flight]);
    let sum = more.try_fold(0u64, |sum, n| sum.checked_add(n));
    match sum.is_some_and(|sum| sum <= MAX_COUNT) {
        true => Ok(()),
        false => Err("more requests or bytes than a disk can have had".into()),
    }
}

fn counts_of(worker: &HistogramsState) -> impl Iterator<Item = u64> + '_ {
    Op::ALL.into_iter().flat_map(|op| {
        let buckets = worker.of(op).iter().flat_map(|stage| stage.buckets());
        let errors = worker.errnos(op).iter().map(|(_, n)| *n);
        let bytes = std::iter::once(worker.bytes(op));
        buckets.map(|(_, n)| n).chain(errors).chain(bytes)
    })
}

/// Checks the parts of a slow request that are written to a page without escaping.
fn check_slow(slow: &SlowRequest) -> Result<(), String> {
    let is_hex = slow.id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_id = is_hex && (1..=MAX_ID).contains(&slow.id.len());
    let is_op = Op::ALL.iter().any(|op| op.name() == slow.op);
    let is_stage = |name: &str| Stage::ALL.iter().any(|stage| stage.name() == name);
    let are_stages = slow.stages.keys().all(|name| is_stage(name)) && is_stage(&slow.longest);
    match is_id && is_op && are_stages {
        true => Ok(()),
        false => Err("a malformed slow request".into()),
    }
}

/// Removes duplicates: two samples with the same labels would make the whole page invalid.
fn make_unambiguous(measured: &mut Measured) {
    let mut queues = BTreeSet::new();
    measured.queues.retain(|queue| queues.insert(queue.queue));
    let mut alarms = BTreeSet::new();
    let alarms_told = &mut measured.info.alarms;
    alarms_told.retain(|alarm| alarms.insert(alarm.alarm.clone()));
}

fn clean_labels(measured: &mut Measured) {
    let info = &mut measured.info;
    // Tenants have no NBD server and mount nothing.
    (info.nbd, info.fuse) = (None, None);
    let known = [&mut info.disk, &mut info.format, &mut info.engine];
    let more = [&mut info.cache, &mut info.pool, &mut info.vhost_user];
    let filters = info.filters.iter_mut().map(|filter| &mut filter.name);
    let alarms = info.alarms.iter_mut().map(|alarm| &mut alarm.alarm);
    let all = known.into_iter().chain(more.into_iter().flatten());
    all.chain(filters).chain(alarms).for_each(clean_text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Form, Page, Scale, expose};
    use serde_json::{Value, json};
    use std::sync::Arc;

    /// Returns the measurements of a disk with some requests, as an honest process sends them.
    fn honest() -> Value {
        let occupied = json!({"buckets": "5:3 7:1", "sum": 22, "max": 7});
        let stages = vec![occupied; Stage::COUNT + 1];
        let none = json!([[], 0]);
        let worker = json!({"requests": 4, "notifications": 1, "sleeps": 1, "batches": [1, 2]});
        let counts = json!({
            "histograms": [{"tsc": true, "bits": 5, "bytes": [2048], "errnos": [[[5, 1]]],
                "ops": [[stages, 1], none, none, none, none, none]}],
            "workers": [worker], "refused": 0,
            "slow": [{"id": "1f", "time_ms": 1, "op": "read", "offset": 0, "len": 512, "queue": 0,
                "error": 0, "polled": false, "total_ns": 5000, "stages": {"map": 1}, "longest": "map"}]
        });
        let queue = json!({"queue": 0, "size": 1, "requests": 1, "in_flight": 0, "kicks": 1,
            "notifications": 1});
        let mut measured =
            serde_json::to_value(Measured::made("a", worker.clone(), counts)).unwrap();
        measured["queues"] = json!([queue]);
        measured["info"]["alarms"] = json!([{"alarm": "p99=1s", "raised": false, "times": 0}]);
        measured
    }

    fn sent(name: &str, measured: &Value) -> Sent {
        Sent {
            name: name.into(),
            pid: 42,
            message: measured.to_string(),
            parse: |text| serde_json::from_str(text).map_err(|error| error.to_string()),
        }
    }

    fn page(disks: Vec<Measured>, form: Form) -> String {
        let page = Page {
            disks,
            guests: Vec::new(),
            own: ProcessInfo::default(),
            scale: Arc::new(Scale::new(1e9)),
            form,
        };
        let mut text = Vec::new();
        let take = |piece: Vec<u8>| {
            text.extend(piece);
            Ok(())
        };
        expose(page, take).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    }

    #[test]
    fn name_and_process_are_those_that_the_supervisor_knows() {
        let mut lie = honest();
        lie["info"]["name"] = "other".into();
        lie["info"]["pid"] = 1.into();
        lie["process"]["pid"] = 1.into();
        let read = sent("mine", &lie).read().unwrap();
        assert_eq!((&*read.info.name, read.info.pid), ("mine", 42));
        assert_eq!(read.process.pid, 42);
    }

    /// Falsifies measurements as a hostile tenant might.
    type Lie = fn(&mut Value);

    #[test]
    fn page_is_the_same_for_others_whatever_one_disk_sends() {
        let lies: [(&str, Lie); 12] = [
            ("no object", |it| *it = json!([1, 2])),
            ("refused", |it| it["counts"]["refused"] = u64::MAX.into()),
            ("bytes", |it| {
                it["counts"]["histograms"][0]["bytes"] = json!([u64::MAX, 1]);
            }),
            ("buckets", |it| {
                let ops = &mut it["counts"]["histograms"][0]["ops"];
                ops[0][0][6]["buckets"] = format!("5:{} 6:{}", u64::MAX, u64::MAX).into();
            }),
            ("sizes", |it| {
                it["info"]["workers"][0]["batches"] = vec![0; 100].into();
            }),
            ("workers", |it| {
                let worker = it["info"]["workers"][0].clone();
                it["info"]["workers"] = vec![worker; 1000].into();
            }),
            ("id", |it| {
                it["counts"]["slow"][0]["id"] = "1\"} 5\nx 1".into()
            }),
            ("stage", |it| {
                it["counts"]["slow"][0]["longest"] = "\n".into()
            }),
            ("twice the same queue", |it| {
                let queue = it["queues"][0].clone();
                it["queues"] = json!([queue, queue]);
            }),
            ("twice the same alarm", |it| {
                let alarm = it["info"]["alarms"][0].clone();
                it["info"]["alarms"] = json!([alarm, alarm]);
            }),
            ("name of another disk", |it| {
                it["info"]["name"] = "good".into()
            }),
            ("lines", |it| it["info"]["format"] = "raw\n# EOF\n".into()),
        ];
        for (what, lie) in lies {
            let mut hostile = honest();
            lie(&mut hostile);
            for form in [Form::OpenMetrics, Form::Text, Form::Protobuf] {
                let disks = vec![sent("evil", &hostile), sent("good", &honest())];
                let read = Measures::OfTenants(disks).read();
                assert!(read.iter().any(|disk| disk.info.name == "good"), "{what}");
                let text = page(read, form);
                if form == Form::Protobuf {
                    continue;
                }
                let good = page(vec![sent("good", &honest()).read().unwrap()], form);
                let of_good = |text: &str| -> Vec<String> {
                    let lines = text.lines().filter(|line| line.contains("disk=\"good\""));
                    lines.map(str::to_owned).collect()
                };
                assert_eq!(of_good(&text), of_good(&good), "{what}");
                let samples = text.lines().filter(|line| !line.starts_with('#'));
                let series: Vec<_> = samples
                    .map(|line| line.rsplit_once(' ').unwrap().0)
                    .collect();
                let different: BTreeSet<_> = series.iter().collect();
                assert_eq!(series.len(), different.len(), "{what}");
                let is_sample = |line: &&str| line.starts_with("fathom_");
                assert!(series.iter().all(is_sample), "{what}: {text}");
                let ends = text.lines().filter(|line| *line == "# EOF").count();
                assert_eq!(ends, usize::from(form == Form::OpenMetrics), "{what}");
            }
        }
    }
}
