//! A tenant's process by its pidfd, started by this supervisor or by a predecessor.

use fathom_units::cause;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::time::{Duration, Instant};

/// Time in which a killed process usually ends.
pub const DIE: Duration = Duration::from_secs(5);

pub struct Handle {
    pid: u32,
    /// Refers to this process, even if another process gets the same process id.
    pidfd: OwnedFd,
    /// None: another process is the parent and reaps it.
    child: Option<Child>,
}

impl Handle {
    pub fn of(mut child: Child) -> io::Result<Handle> {
        // The process id cannot be reused before the process is reaped.
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Handle {
                pid: child.id(),
                pidfd,
                child: Some(child),
            }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error.into())
            }
        }
    }

    pub fn adopt(pid: u32, pidfd: OwnedFd) -> Handle {
        let child = None;
        Handle { pid, pidfd, child }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Kills the process without waiting. Returns whether the process has ended. A process whose
    /// I/O is stuck in the kernel may never end.
    pub fn kill(&self) -> bool {
        // (The process may have ended already.)
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        has_ended(&self.pidfd, Instant::now())
    }

    /// Kills the process, and waits for its end, at most until `deadline`. Returns how the process
    /// has ended.
    pub fn end(mut self, deadline: Instant) -> String {
        self.kill();
        if !has_ended(&self.pidfd, deadline) {
            return "was killed and has not ended yet".into();
        }
        let status = match &mut self.child {
            Some(child) => child.wait(),
            None => return "has ended".into(),
        };
        match status {
            Err(error) => format!("cannot be waited for: {}", cause(error)),
            Ok(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("ended with status {code}"),
                (_, Some(signal)) => format!("was ended by signal {signal}"),
                _ => "has ended".to_owned(),
            },
        }
    }
}

/// The pidfd, which is readable when the process has ended. A successor of this supervisor gets it.
impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

fn has_ended(pidfd: &OwnedFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], left.as_ref()) {
            Err(Errno::INTR) => {}
            ended => return ended == Ok(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_is_ended_whoever_has_started_it() {
        let start = || Command::new("sleep").arg("1000").spawn().unwrap();
        let own = Handle::of(start()).unwrap();
        let deadline = Instant::now() + fathom_testing::PATIENCE;
        assert_eq!(own.end(deadline), "was ended by signal 9");
        let mut child = start();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        assert!(!has_ended(&pidfd, Instant::now()));
        assert_eq!(Handle::adopt(child.id(), pidfd).end(deadline), "has ended");
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }
}
