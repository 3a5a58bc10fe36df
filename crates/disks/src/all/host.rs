//! Carries out the commands that the controller forwards.

use super::Objects;
use crate::disk::Served;
use crate::nbd::Nbd;
use crate::tracer::{CALIBRATE_EVERY, Tracer};
use fathom_control::RequestError;
use fathom_host::handover::HandoverHost;
use fathom_host::{Error, Host, Outcome, StopTimeout};
use fathom_metrics::{Measures, ProcessInfo};
use fathom_requests::{Ask, Responder, Shown};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

impl Host for Objects {
    fn ask(&mut self, ask: Ask, responder: Responder) {
        self.handle(ask, responder);
    }

    fn list(&mut self, next: Box<dyn FnOnce(Vec<Shown>) + Send>) {
        let disks = (0..self.disks.len()).map(|index| self.show(index));
        next(disks.collect());
    }

    fn measure_all(&mut self, responder: Box<dyn FnOnce(Measures) + Send>) {
        let own = ProcessInfo::own();
        let disks = (0..self.disks.len()).map(|index| self.measure(index, own.clone()));
        responder(Measures::Own(disks.collect()));
    }

    fn events(&self) -> Vec<BorrowedFd<'_>> {
        let traces = self.traces().map(|(_, trace)| trace.cut_event());
        let mail = std::iter::once(self.mail.as_fd());
        mail.chain(self.ended()).chain(traces).collect()
    }

    fn patience(&self) -> Option<Duration> {
        let traced = self.traces().next().map(|_| CALIBRATE_EVERY);
        let looks = [
            self.until_next_look(),
            self.until_next_thaw(),
            self.until_next_alarm(),
            self.until_next_job(),
            traced,
        ];
        looks.into_iter().flatten().min()
    }

    fn turn(&mut self) -> bool {
        self.check_traces();
        self.thaw_late();
        self.check_alarms();
        for event in self.mail.take() {
            self.on_event(event);
        }
        self.resize_changed_files();
        self.restore_options();
        for leaving in std::mem::take(&mut self.leaving) {
            self.leave(leaving);
        }
        !self.ended().any(is_readable)
    }

    fn describe(&self) -> Vec<String> {
        let mut lines: Vec<_> = self.disks.iter().map(Served::describe).collect();
        if let Some(nbd) = &self.nbd {
            let addresses = nbd.addresses().join(", ");
            lines.push(format!("NBD clients connect to {addresses}"));
        }
        lines
    }

    fn names(&self) -> Vec<String> {
        self.disks
            .iter()
            .map(|disk| disk.name().to_owned())
            .collect()
    }

    fn open_listener(&self) -> Option<String> {
        self.nbd.as_ref()?.open_listener()
    }

    fn set_stop_timeout(&mut self, timeout: StopTimeout) {
        self.stop_timeout = timeout;
    }

    fn stop(&mut self) -> Result<(), Error> {
        self.end_all()
    }

    fn outcomes(&self) -> Vec<(String, Outcome)> {
        let outcome = |disk: &Served| (disk.name().to_owned(), disk.outcome());
        self.disks.iter().map(outcome).collect()
    }

    fn handover_host(&mut self) -> Result<&mut dyn HandoverHost, RequestError> {
        Ok(self)
    }
}

impl Objects {
    /// Returns file descriptors that are readable after a thread that serves front-ends or clients
    /// has ended by itself, which is an error.
    fn ended(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let front_ends = self.disks.iter().filter_map(Served::ended);
        let files = self.disks.iter().filter_map(Served::file_ended);
        front_ends
            .chain(files)
            .chain(self.nbd.iter().map(Nbd::ended))
    }

    fn until_next_alarm(&self) -> Option<Duration> {
        let next = self
            .disks
            .iter()
            .filter_map(Served::next_look_at_alarms)
            .min();
        next.map(|next| next.saturating_duration_since(Instant::now()))
    }

    fn check_alarms(&mut self) {
        let now = Instant::now();
        for disk in &mut self.disks {
            if disk.next_look_at_alarms().is_some_and(|next| next <= now) {
                disk.look_at_alarms();
            }
        }
    }

    fn check_traces(&mut self) {
        let is_cut = |(_, trace): &(usize, &Tracer)| is_readable(trace.cut_event());
        let cut: Vec<_> = self.traces().filter(is_cut).map(|(i, _)| i).collect();
        for disk in cut {
            self.disks[disk].drop_cut_trace();
        }
        self.disks.iter_mut().for_each(Served::calibrate_trace);
    }
}

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let now = Timespec::default();
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut fds, Some(&now)) == Ok(1)
}
