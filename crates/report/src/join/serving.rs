//! The system calls of a server without its own stamps: when it waited for work and when it
//! passed I/O to the kernel. Where the calls leave no doubt, they show when the server woke,
//! submitted and had the result. Otherwise the time belongs to a wider layer.

use std::collections::{HashMap, VecDeque};

use fathom_run::{Event, IoCall, Kind, io_call};

/// Maximum number of threads that are followed; bounds memory for a damaged file.
const MAX_THREADS: usize = 4096;
/// ERESTARTSYS, ERESTARTNOINTR and ERESTARTNOHAND (linux/errno.h): the kernel restarts the call,
/// invisibly to its caller. io_uring's completions interrupt a poll in this way.
const RESTARTED: std::ops::RangeInclusive<i64> = -514..=-512;

/// A system call of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    number: u64,
    pub(crate) enter: i64,
    /// When the call returned; None if it has not returned.
    pub(crate) exit: Option<i64>,
    pub(crate) does: IoCall,
    /// The call will be restarted, unless a signal is handled first.
    restarts: bool,
}

impl Call {
    fn contains(&self, at: i64) -> bool {
        self.enter <= at && self.exit.is_none_or(|exit| at <= exit)
    }
}

/// The system calls of all threads.
#[derive(Debug, Default)]
pub(crate) struct Serving {
    threads: HashMap<u32, VecDeque<Call>>,
    /// Times at which events were lost; a period that contains one is unknown.
    gaps: VecDeque<i64>,
    /// Number of calls without a return, and of returns without a call.
    pub(crate) garbled: u64,
}

/// The known points of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub(crate) signal: Option<i64>,
    /// The issue of the host's request; `issuer` is the thread that issued it.
    pub(crate) issue: i64,
    pub(crate) complete: Option<i64>,
    pub(crate) issuer: u32,
    /// The interrupt, and the server's thread that sent it, if that thread took the request.
    pub(crate) interrupt: Option<(i64, Option<u32>)>,
}

/// Times of a request's stages, as the system calls show them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Served {
    /// When the wait returned that the kick ended.
    pub(crate) wake: Option<i64>,
    /// When the server entered the call that issued the request to the device.
    pub(crate) device: Option<i64>,
    /// When the read or write returned, or the wait that the completion ended.
    pub(crate) result: Option<i64>,
}

impl Serving {
    pub(crate) fn event(&mut self, at: i64, event: &Event) {
        match event.kind {
            Kind::SysEnter => {
                if let Some(does) = io_call(&event.args) {
                    self.enter(at, event, does);
                }
            }
            Kind::SysExit => self.exit(at, event),
            Kind::Lost => self.gaps.push_back(at),
            _ => {}
        }
    }

    fn enter(&mut self, enter: i64, event: &Event, does: IoCall) {
        if self.threads.len() >= MAX_THREADS && !self.threads.contains_key(&event.tid) {
            return;
        }
        let calls = self.threads.entry(event.tid).or_default();
        if let Some(last) = calls.back_mut().filter(|last| last.restarts) {
            last.restarts = false;
            if last.number == event.args[0] {
                last.exit = None;
                return;
            }
        }
        if calls.back().is_some_and(|last| last.exit.is_none()) {
            calls.pop_back();
            self.garbled += 1;
            self.gaps.push_back(enter);
        }
        calls.push_back(Call {
            number: event.args[0],
            enter,
            exit: None,
            does,
            restarts: false,
        });
    }

    fn exit(&mut self, at: i64, event: &Event) {
        // A thread's first event may be the return from a call before the recording.
        let Some(last) = self
            .threads
            .get_mut(&event.tid)
            .and_then(VecDeque::back_mut)
        else {
            return;
        };
        if last.exit.is_none() && last.number == event.args[0] {
            last.exit = Some(at);
            last.restarts = RESTARTED.contains(&event.args[1].cast_signed());
        } else {
            self.garbled += 1;
            self.gaps.push_back(at);
        }
    }

    /// Returns the call that a thread was in at `at`.
    fn during(&self, tid: u32, at: i64) -> Option<Call> {
        let calls = self.threads.get(&tid)?;
        let next = calls.partition_point(|call| call.enter <= at);
        let call = *calls.get(next.checked_sub(1)?)?;
        call.contains(at).then_some(call)
    }

    /// Returns when the wait that a thread was in at `from` returned. Returns None if another wait
    /// also returned by `to`: either of them could be the right one.
    fn only_return(&self, tid: u32, from: i64, to: i64) -> Option<i64> {
        let call = self.during(tid, from).filter(|call| call.does.waits)?;
        let exit = call.exit.filter(|&exit| exit <= to)?;
        let lost = self.gaps.iter().any(|gap| (call.enter..=to).contains(gap));
        let calls = self.threads.get(&tid)?;
        let next = calls.partition_point(|call| call.enter <= from);
        let mut later = calls.range(next..).take_while(|call| call.enter <= to);
        let another = later.any(|call| call.does.waits && call.exit.is_some_and(|at| at <= to));
        (!lost && !another).then_some(exit)
    }

    /// Returns what the calls show beyond doubt.
    pub(crate) fn tell(&self, frame: &Frame) -> Served {
        let Frame {
            signal,
            issue,
            complete,
            issuer,
            interrupt,
        } = *frame;
        // An issue outside such a call is a kernel worker's, which does not show the requester.
        let own = self.during(issuer, issue);
        let own = own.filter(|call| call.does.submits || call.does.sync);
        let is_sync = own.is_some_and(|call| call.does.sync);
        let device = own.map(|call| call.enter);
        let sender = interrupt.and_then(|(_, sender)| sender);
        let server = match own {
            Some(call) if call.does.submits => Some(issuer),
            _ => sender,
        };
        let sent = interrupt.map(|(at, _)| at);
        let wake = signal.zip(server).and_then(|(signal, server)| {
            let until = device.unwrap_or(issue);
            self.only_return(server, signal, until)
        });
        let result = complete.zip(sent).and_then(|(complete, sent)| {
            let returned = match (own, server) {
                (Some(call), _) if is_sync => call.exit.filter(|&exit| exit >= complete),
                // A call that issues and waits returns with the result, or for another reason.
                (Some(_), Some(server)) => self.only_return(server, complete, sent),
                _ => None,
            };
            returned.filter(|&at| at <= sent)
        });
        Served {
            wake,
            device,
            result,
        }
    }

    /// Drops calls and gaps that ended before `at`.
    pub(crate) fn prune(&mut self, at: i64) {
        for calls in self.threads.values_mut() {
            while calls
                .front()
                .is_some_and(|call| call.exit.is_some_and(|exit| exit < at))
            {
                calls.pop_front();
            }
        }
        self.threads.retain(|_, calls| !calls.is_empty());
        while self.gaps.front().is_some_and(|&gap| gap < at) {
            self.gaps.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PPOLL: u64 = 271;
    const PREAD: u64 = 17;
    const SUBMIT: u64 = 209;
    const RING: u64 = 426;

    /// Builds the state from calls: (thread, number, [to_submit, min_complete], enter, exit).
    fn serving(calls: &[(u32, u64, [u64; 2], i64, i64)]) -> Serving {
        let mut events: Vec<(i64, Event)> = Vec::new();
        for &(tid, number, [submit, min], enter, exit) in calls {
            let args = [number, 5, submit, min, 0];
            events.push((enter, Event::new(0, Kind::SysEnter, 0, tid, &args)));
            events.push((exit, Event::new(0, Kind::SysExit, 0, tid, &[number, 0])));
        }
        events.sort_by_key(|&(at, _)| at);
        let mut serving = Serving::default();
        for (at, event) in events {
            serving.event(at, &event);
        }
        serving
    }

    const FRAME: Frame = Frame {
        signal: Some(100),
        issue: 220,
        complete: Some(400),
        issuer: 1,
        interrupt: Some((600, Some(1))),
    };

    fn served(wake: Option<i64>, device: Option<i64>, result: Option<i64>) -> Served {
        Served {
            wake,
            device,
            result,
        }
    }

    #[test]
    fn a_thread_that_waits_and_submits() {
        for submit in [SUBMIT, RING] {
            let serving = serving(&[
                (1, PPOLL, [0, 0], 10, 120),
                (1, submit, [1, 0], 200, 250),
                (1, PPOLL, [0, 0], 300, 450),
                (1, PPOLL, [0, 0], 700, 900),
            ]);
            let wanted = served(Some(120), Some(200), Some(450));
            assert_eq!(serving.tell(&FRAME), wanted);
        }
        // A single call that submits and waits, as in QEMU's io_uring loop.
        let serving = serving(&[
            (1, RING, [0, 1], 10, 120),
            (1, RING, [1, 1], 200, 450),
            (1, RING, [0, 1], 700, 900),
        ]);
        let wanted = served(Some(120), Some(200), Some(450));
        assert_eq!(serving.tell(&FRAME), wanted);
    }

    #[test]
    fn a_pool_of_threads() {
        let serving = serving(&[
            (1, PPOLL, [0, 0], 10, 120),
            (2, PREAD, [0, 0], 200, 420),
            (1, PPOLL, [0, 0], 130, 500),
        ]);
        let frame = Frame { issuer: 2, ..FRAME };
        let wanted = served(Some(120), Some(200), Some(420));
        assert_eq!(serving.tell(&frame), wanted);
        // The thread that sent the interrupt is unknown, so the thread that woke is too.
        let interrupt = Some((600, None));
        let frame = Frame { interrupt, ..frame };
        let wanted = served(None, Some(200), Some(420));
        assert_eq!(serving.tell(&frame), wanted);
    }

    #[test]
    fn what_is_in_doubt_is_not_told() {
        let nothing = Served::default();
        // No call contains the issue: a kernel worker issued the request.
        let worker = serving(&[(1, PPOLL, [0, 0], 10, 120), (1, SUBMIT, [1, 0], 130, 140)]);
        let frame = Frame { issuer: 7, ..FRAME };
        assert_eq!(worker.tell(&frame).device, None);
        // A call that entered the ring to submit nothing ran deferred work of another request.
        let deferred = serving(&[(1, RING, [0, 0], 200, 250)]);
        assert_eq!(deferred.tell(&FRAME), nothing);
        // Two waits returned before the submit, and two before the interrupt.
        let twice = serving(&[
            (1, PPOLL, [0, 0], 10, 120),
            (1, PPOLL, [0, 0], 130, 140),
            (1, SUBMIT, [1, 0], 200, 250),
            (1, PPOLL, [0, 0], 300, 450),
            (1, PPOLL, [0, 0], 460, 470),
        ]);
        assert_eq!(twice.tell(&FRAME), served(None, Some(200), None));
        // The thread was busy at the kick and at the completion: it may have polled.
        let busy = serving(&[
            (1, PPOLL, [0, 0], 110, 120),
            (1, SUBMIT, [1, 0], 200, 250),
            (1, PPOLL, [0, 0], 410, 450),
        ]);
        assert_eq!(busy.tell(&FRAME), served(None, Some(200), None));
        // Events are missing, or the request's interrupt is unknown.
        let calls = [
            (1, PPOLL, [0, 0], 10, 120),
            (1, SUBMIT, [1, 0], 200, 250),
            (1, PPOLL, [0, 0], 300, 450),
        ];
        let mut lost = serving(&calls);
        lost.event(460, &Event::new(0, Kind::Lost, 0, 0, &[1]));
        assert_eq!(lost.tell(&FRAME), served(Some(120), Some(200), None));
        let frame = Frame {
            interrupt: None,
            ..FRAME
        };
        let wanted = served(Some(120), Some(200), None);
        assert_eq!(serving(&calls).tell(&frame), wanted);
    }

    /// Replays the events of io_uring's completions in QEMU, as seen on Linux 6.1.
    #[test]
    fn a_call_that_the_kernel_restarts_is_one_call() {
        let mut serving = serving(&[(1, PPOLL, [0, 0], 10, 120), (1, RING, [1, 0], 200, 250)]);
        let enter = Event::new(0, Kind::SysEnter, 0, 1, &[PPOLL, 5, 0, 0, 0]);
        let exit = |result: i64| {
            let args = [PPOLL, result.cast_unsigned()];
            Event::new(0, Kind::SysExit, 0, 1, &args)
        };
        let events = [
            (300, enter),
            (420, exit(-514)),
            (425, enter),
            (450, exit(1)),
        ];
        events
            .iter()
            .for_each(|(at, event)| serving.event(*at, event));
        let wanted = served(Some(120), Some(200), Some(450));
        assert_eq!((serving.tell(&FRAME), serving.garbled), (wanted, 0));
        // A signal handler ran, so the call was over.
        let other = Event::new(0, Kind::SysEnter, 0, 1, &[SUBMIT, 5, 1, 0, 0]);
        for (at, event) in [(500, enter), (510, exit(-514)), (520, other)] {
            serving.event(at, &event);
        }
        assert_eq!(serving.during(1, 505).unwrap().exit, Some(510));
        assert_eq!(serving.garbled, 0);
    }

    #[test]
    fn what_is_over_is_dropped() {
        let mut serving = serving(&[(1, PPOLL, [0, 0], 10, 120), (2, PREAD, [0, 0], 50, 60)]);
        serving.event(70, &Event::new(0, Kind::Lost, 0, 0, &[1]));
        serving.prune(100);
        assert_eq!((serving.threads.len(), serving.gaps.len()), (1, 0));
        assert!(serving.during(1, 100).is_some());
        serving.prune(121);
        assert!(serving.threads.is_empty());
    }
}
