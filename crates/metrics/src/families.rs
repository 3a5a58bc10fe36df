//! The metrics of disks, in the order of the page.

use super::measured::{Measured, QueueInfo};
use super::samples::{Family, Label, Samples};
use crate::alarm::AlarmInfo;
use crate::info::ImageInfo;
use crate::worker_info::WorkerInfo;
use fathom_trace::{HistogramsState, Occupied, Op, SlowRequest, Stage};
use prometheus_client::metrics::MetricType::{Counter, Gauge, Histogram, Info};
use prometheus_client::registry::Unit;
use rustix::io::Errno;
use std::fmt;

/// Total duration of requests.
pub const DURATION: &str = "request_duration";

/// The metrics of each disk. Names lack the prefix `fathom_`, the unit, and the type's suffix.
pub const DISKS: &[Family] = &[
    Family {
        name: "disk",
        unit: None,
        kind: Info,
        help: "A disk's image and settings",
        samples: disk_info,
    },
    Family {
        name: "disk_size",
        unit: Some(Unit::Bytes),
        kind: Gauge,
        help: "Size of the disk",
        samples: |disk, to| to.gauge(&[], disk.info.size),
    },
    Family {
        name: "requests",
        unit: None,
        kind: Counter,
        help: "Completed requests, by operation",
        samples: |disk, to| each_op(disk, |op, all| to.counter(&[op], all.requests())),
    },
    Family {
        name: "request_data",
        unit: Some(Unit::Bytes),
        kind: Counter,
        help: "Bytes read, written, discarded or zeroed by requests that succeeded",
        samples: |disk, to| each_op(disk, |op, all| to.counter(&[op], all.bytes())),
    },
    Family {
        name: "request_errors",
        unit: None,
        kind: Counter,
        help: "Requests that failed, by operation and error",
        samples: request_errors,
    },
    Family {
        name: "requests_refused",
        unit: None,
        kind: Counter,
        help: "Requests that violated their protocol or that the disk does not support; no other \
            metric counts them",
        samples: |disk, to| to.counter(&[], disk.counts.refused),
    },
    Family {
        name: DURATION,
        unit: Some(Unit::Seconds),
        kind: Histogram,
        help: "Duration of requests, from the moment when the server notices them until their \
             interrupt or reply is sent",
        samples: |disk, to| {
            each_op(disk, |op, all| {
                to.latency(&[op], all.histograms(Stage::COUNT), true)
            })
        },
    },
    Family {
        name: "stage_duration",
        unit: Some(Unit::Seconds),
        kind: Histogram,
        help: "Time of requests in each stage: wake (noticed, not taken yet), queue (in \
            filters), map (in the image's tables), device (in the storage), finish, notify",
        samples: stage_duration,
    },
    Family {
        name: "requests_in_flight",
        unit: None,
        kind: Gauge,
        help: "Requests that were taken and are not completed",
        samples: |disk, to| to.gauge(&[], disk.in_flight),
    },
    Family {
        name: "queue_size",
        unit: None,
        kind: Gauge,
        help: "Size of a running virtqueue",
        samples: |disk, to| each_queue(disk, |label, queue| to.gauge(&[label], queue.size)),
    },
    Family {
        name: "queue_requests_in_flight",
        unit: None,
        kind: Gauge,
        help: "Requests in flight of a virtqueue",
        samples: |disk, to| each_queue(disk, |label, queue| to.gauge(&[label], queue.in_flight)),
    },
    Family {
        name: "queue_requests",
        unit: None,
        kind: Counter,
        help: "Requests taken from a virtqueue since it was started",
        samples: |disk, to| each_queue(disk, |label, queue| to.counter(&[label], queue.requests)),
    },
    Family {
        name: "queue_kicks",
        unit: None,
        kind: Counter,
        help: "Notifications from the guest for a virtqueue",
        samples: |disk, to| each_queue(disk, |label, queue| to.counter(&[label], queue.kicks)),
    },
    Family {
        name: "queue_interrupts",
        unit: None,
        kind: Counter,
        help: "Interrupts sent to the guest for a virtqueue",
        samples: |disk, to| {
            each_queue(disk, |label, queue| {
                to.counter(&[label], queue.notifications)
            })
        },
    },
    Family {
        name: "worker_requests",
        unit: None,
        kind: Counter,
        help: "Requests that a worker has completed",
        samples: |disk, to| {
            each_worker(disk, |label, worker| to.counter(&[label], worker.requests))
        },
    },
    Family {
        name: "worker_batch_requests",
        unit: None,
        kind: Histogram,
        help: "Requests that a worker took at once",
        samples: |disk, to| {
            each_worker(disk, |label, worker| {
                to.sizes(&[label], &worker.batches, worker.requests)
            })
        },
    },
    Family {
        name: "worker_kicks",
        unit: None,
        kind: Counter,
        help: "Notifications from guests to a worker",
        samples: |disk, to| each_worker(disk, |label, worker| to.counter(&[label], worker.kicks)),
    },
    Family {
        name: "worker_interrupts",
        unit: None,
        kind: Counter,
        help: "Interrupts that a worker has sent to guests",
        samples: |disk, to| {
            each_worker(disk, |label, worker| {
                to.counter(&[label], worker.notifications)
            })
        },
    },
    Family {
        name: "worker_sleeps",
        unit: None,
        kind: Counter,
        help: "Times that a worker went to sleep because it had no work",
        samples: |disk, to| each_worker(disk, |label, worker| to.counter(&[label], worker.sleeps)),
    },
    Family {
        name: "worker_polls",
        unit: None,
        kind: Counter,
        help: "Times that a worker polled instead of sleeping; found=\"yes\": it found work",
        samples: |disk, to| {
            each_worker(disk, |label, worker| {
                to.counter(&[label, ("found", "yes")], worker.polls_paid)?;
                to.counter(&[label, ("found", "no")], worker.polls_vain)
            })
        },
    },
    Family {
        name: "worker_polling",
        unit: Some(Unit::Seconds),
        kind: Counter,
        help: "Time that a worker has polled",
        samples: |disk, to| {
            each_worker(disk, |label, worker| to.seconds(&[label], worker.polled_ns))
        },
    },
    Family {
        name: "worker_cpu",
        unit: Some(Unit::Seconds),
        kind: Counter,
        help: "CPU time of a worker's thread, except threads of pools",
        samples: |disk, to| {
            each_worker(disk, |label, worker| match worker.cpu_ns {
                Some(ns) => to.seconds(&[label], ns),
                None => Ok(()),
            })
        },
    },
    Family {
        name: "front_end_connected",
        unit: None,
        kind: Gauge,
        help: "Whether a front-end is connected to the disk",
        samples: |disk, to| match &disk.info.vhost_user {
            Some(_) => to.gauge(&[], disk.info.front_end.is_some().into()),
            None => Ok(()),
        },
    },
    Family {
        name: "front_end_connects",
        unit: None,
        kind: Counter,
        help: "Connections of front-ends to the disk",
        samples: |disk, to| match &disk.info.vhost_user {
            Some(_) => to.counter(&[], disk.front_ends),
            None => Ok(()),
        },
    },
    Family {
        name: "queues_running",
        unit: None,
        kind: Gauge,
        help: "Virtqueues that are running",
        samples: |disk, to| to.gauge(&[], disk.info.queues_running as u64),
    },
    Family {
        name: "nbd_clients",
        unit: None,
        kind: Gauge,
        help: "NBD connections to the disk",
        samples: |disk, to| match &disk.info.nbd {
            Some(nbd) => to.gauge(&[], nbd.connections.len() as u64),
            None => Ok(()),
        },
    },
    Family {
        name: "nbd_client_connects",
        unit: None,
        kind: Counter,
        help: "NBD connections to the disk since it was added",
        samples: |disk, to| match &disk.info.nbd {
            Some(_) => to.counter(&[], disk.clients),
            None => Ok(()),
        },
    },
    Family {
        name: "fuse_opens",
        unit: None,
        kind: Gauge,
        help: "Number of times that programs have the disk's file open",
        samples: |disk, to| match &disk.info.fuse {
            Some(fuse) => to.gauge(&[], fuse.open),
            None => Ok(()),
        },
    },
    Family {
        name: "filter_held",
        unit: Some(Unit::Seconds),
        kind: Counter,
        help: "Time that all workers together have delayed requests because of a filter's limits",
        samples: filter_held,
    },
    Family {
        name: "alarm_raised",
        unit: None,
        kind: Gauge,
        help: "Whether an alarm is raised because requests take too long",
        samples: |disk, to| {
            each_alarm(disk, |label, alarm| to.gauge(&[label], alarm.raised.into()))
        },
    },
    Family {
        name: "alarms",
        unit: None,
        kind: Counter,
        help: "Times that an alarm was raised",
        samples: |disk, to| each_alarm(disk, |label, alarm| to.counter(&[label], alarm.times)),
    },
    Family {
        name: "disk_frozen",
        unit: None,
        kind: Gauge,
        help: "Whether the disk is frozen (fathom disk freeze)",
        samples: |disk, to| to.gauge(&[], disk.info.frozen.into()),
    },
    Family {
        name: "pull_left",
        unit: Some(Unit::Bytes),
        kind: Gauge,
        help: "Bytes that are still to be copied from the other server, as far as known",
        samples: |disk, to| match &disk.info.pull {
            Some(pull) => to.gauge(&[], pull.left),
            None => Ok(()),
        },
    },
    Family {
        name: "pull_copied",
        unit: Some(Unit::Bytes),
        kind: Counter,
        help: "Bytes that were copied from the other server, including repeated copies",
        samples: |disk, to| match &disk.info.pull {
            Some(pull) => to.counter(&[], pull.copied),
            None => Ok(()),
        },
    },
    Family {
        name: "disk_moved",
        unit: None,
        kind: Gauge,
        help: "Whether another server has taken the disk over",
        samples: |disk, to| to.gauge(&[], disk.info.moved.into()),
    },
    Family {
        name: "requests_bounced",
        unit: None,
        kind: Counter,
        help: "Requests whose data was copied because its alignment does not suit O_DIRECT",
        samples: |disk, to| match disk.info.bounced {
            Some(count) => to.counter(&[], count),
            None => Ok(()),
        },
    },
    Family {
        name: "image_table_reads",
        unit: None,
        kind: Counter,
        help: "Reads of 4 KiB of an image's tables that were not in memory",
        samples: |disk, to| of_image(disk, to, |image| image.table_reads),
    },
    Family {
        name: "image_clusters_allocated",
        unit: None,
        kind: Counter,
        help: "Clusters that were allocated in an image",
        samples: |disk, to| of_image(disk, to, |image| image.clusters_allocated),
    },
    Family {
        name: "image_clusters_freed",
        unit: None,
        kind: Counter,
        help: "Clusters that were freed in an image",
        samples: |disk, to| of_image(disk, to, |image| image.clusters_freed),
    },
];

fn of_image(
    disk: &Measured,
    to: &mut Samples<'_, '_>,
    count: fn(&ImageInfo) -> u64,
) -> fmt::Result {
    match &disk.info.image {
        Some(image) => to.counter(&[], count(image)),
        None => Ok(()),
    }
}

fn disk_info(disk: &Measured, to: &mut Samples<'_, '_>) -> fmt::Result {
    let info = &disk.info;
    let mut labels = vec![
        ("image", &*info.disk),
        ("format", &info.format),
        ("engine", &info.engine),
        ("read_only", if info.read_only { "yes" } else { "no" }),
    ];
    let more = [
        ("cache", &info.cache),
        ("pool", &info.pool),
        ("vhost_user", &info.vhost_user),
    ];
    let more = more.iter();
    labels.extend(more.filter_map(|(name, value)| Some((*name, value.as_deref()?))));
    if let Some(nbd) = &info.nbd {
        labels.push(("nbd_export", &nbd.export));
    }
    to.info(&labels)
}

/// The counters of one operation.
pub struct OfOp<'a> {
    op: Op,
    all: &'a [HistogramsState],
    slow: &'a [SlowRequest],
}

impl<'a> OfOp<'a> {
    /// Returns the histograms of one stage, or of all together if `stage` is the number of stages.
    fn histograms(&self, stage: usize) -> impl Iterator<Item = &'a Occupied> + Clone + use<'a> {
        let op = self.op;
        self.all.iter().filter_map(move |one| one.of(op).get(stage))
    }

    /// Returns some of the slowest requests, the slowest last.
    pub fn slow(&self) -> impl Iterator<Item = &'a SlowRequest> + use<'a> {
        let name = self.op.name();
        self.slow.iter().rev().filter(move |one| one.op == name)
    }

    fn requests(&self) -> u64 {
        let buckets = self.histograms(Stage::COUNT).flat_map(|all| all.buckets());
        buckets.map(|(_, n)| n).sum()
    }

    fn bytes(&self) -> u64 {
        self.all.iter().map(|one| one.bytes(self.op)).sum()
    }
}

/// Calls `tell` for each operation that has occurred.
pub fn each_op<'a>(
    disk: &'a Measured,
    mut tell: impl FnMut((&'static str, &'static str), OfOp<'a>) -> fmt::Result,
) -> fmt::Result {
    let (all, slow) = (&disk.counts.histograms, &disk.counts.slow);
    let occurred = |op: &Op| all.iter().any(|one| !one.of(*op).is_empty());
    for op in Op::ALL.into_iter().filter(occurred) {
        tell(("op", op.name()), OfOp { op, all, slow })?;
    }
    Ok(())
}

fn stage_duration(disk: &Measured, to: &mut Samples<'_, '_>) -> fmt::Result {
    each_op(disk, |op, all| {
        Stage::ALL.into_iter().try_for_each(|stage| {
            let histograms = all.histograms(stage as usize);
            to.latency(&[op, ("stage", stage.name())], histograms, false)
        })
    })
}

fn request_errors(disk: &Measured, to: &mut Samples<'_, '_>) -> fmt::Result {
    each_op(disk, |op, all| {
        let mut counts = [0; 256];
        for (errno, n) in all.all.iter().flat_map(|one| one.errnos(all.op)) {
            counts[usize::from(*errno)] += n;
        }
        let occurred = (0..=u8::MAX).zip(counts).filter(|(_, n)| *n > 0);
        { occurred }.try_for_each(|(errno, n)| to.counter(&[op, ("error", &name_of(errno))], n))
    })
}

/// Returns the name of an errno that disks commonly return, otherwise its number.
fn name_of(errno: u8) -> String {
    let known = [
        (Errno::IO, "EIO"),
        (Errno::NOSPC, "ENOSPC"),
        (Errno::INVAL, "EINVAL"),
        (Errno::PERM, "EPERM"),
        (Errno::NOTSUP, "EOPNOTSUPP"),
        (Errno::TIMEDOUT, "ETIMEDOUT"),
        (Errno::DQUOT, "EDQUOT"),
        (Errno::FBIG, "EFBIG"),
        (Errno::ROFS, "EROFS"),
        (Errno::NOMEM, "ENOMEM"),
        (Errno::SHUTDOWN, "ESHUTDOWN"),
        (Errno::CONNRESET, "ECONNRESET"),
    ];
    let name = known
        .iter()
        .find(|(known, _)| known.raw_os_error() == i32::from(errno));
    name.map_or_else(|| errno.to_string(), |(_, name)| (*name).to_owned())
}

fn each_queue(
    disk: &Measured,
    mut tell: impl FnMut(Label<'_>, &QueueInfo) -> fmt::Result,
) -> fmt::Result {
    let mut queues = disk.queues.iter();
    queues.try_for_each(|queue| tell(("queue", &queue.queue.to_string()), queue))
}

fn filter_held(disk: &Measured, to: &mut Samples<'_, '_>) -> fmt::Result {
    let filters = disk.info.filters.iter().enumerate();
    let mut held = filters.filter_map(|(at, one)| Some((at.to_string(), one, one.held_ns?)));
    held.try_for_each(|(at, one, ns)| to.seconds(&[("filter", &one.name), ("place", &at)], ns))
}

fn each_alarm(
    disk: &Measured,
    mut tell: impl FnMut(Label<'_>, &AlarmInfo) -> fmt::Result,
) -> fmt::Result {
    let mut alarms = disk.info.alarms.iter();
    alarms.try_for_each(|alarm| tell(("alarm", &alarm.alarm), alarm))
}

fn each_worker(
    disk: &Measured,
    mut tell: impl FnMut(Label<'_>, &WorkerInfo) -> fmt::Result,
) -> fmt::Result {
    let mut workers = disk.info.workers.iter().enumerate();
    workers.try_for_each(|(index, worker)| tell(("worker", &index.to_string()), worker))
}
