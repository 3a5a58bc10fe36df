//! I/O that the watched processes caused (/proc/PID/io, proc_pid_io(5)), to tell it from that of
//! other programs on the same device.

use std::io;

/// Bytes that a window's processes read from and wrote to storage.
///
/// The kernel counts a write to the page cache when the page becomes dirty, and I/O below a loop
/// device or a device mapper once, for the process that caused it. Therefore the sum is close to
/// the device's bytes, but not equal.
pub struct OwnIo {
    /// `None` if the I/O of a process cannot be read, so that the sum is not known.
    processes: Option<Vec<Process>>,
}

struct Process {
    pid: u32,
    /// Bytes at the window's begin.
    begin: u64,
    /// Bytes when they were last read.
    last: u64,
}

impl OwnIo {
    /// Begins a window with these processes.
    pub fn begin(pids: impl Iterator<Item = u32>) -> OwnIo {
        let process = |pid| match read(pid) {
            Ok(begin) => Some(Ok(Process {
                pid,
                begin,
                last: begin,
            })),
            Err(error) if has_ended(&error) => None,
            Err(error) => Some(Err(error)),
        };
        let processes: io::Result<Vec<Process>> = pids.filter_map(process).collect();
        OwnIo {
            processes: processes.ok(),
        }
    }

    /// Adds a process that has started within the window.
    pub fn add(&mut self, pid: u32) {
        let Some(processes) = &mut self.processes else {
            return;
        };
        match read(pid) {
            Ok(last) => processes.push(Process {
                pid,
                begin: 0,
                last,
            }),
            // A process that has ended already had no time for much I/O.
            Err(error) if has_ended(&error) => (),
            Err(_) => self.processes = None,
        }
    }

    /// Reads the bytes of all processes. The last bytes of a process that has ended are kept.
    pub fn read(&mut self) {
        for process in self.processes.iter_mut().flatten() {
            // A later process with the same number has fewer bytes.
            let now = read(process.pid).unwrap_or(process.last);
            process.last = now.max(process.last);
        }
    }

    /// Returns the bytes of all processes since the window's begin. `None` if they are not known.
    pub fn bytes(&self) -> Option<u64> {
        let processes = self.processes.as_ref().filter(|all| !all.is_empty())?;
        let of_process = processes.iter().map(|one| one.last - one.begin);
        Some(of_process.fold(0, u64::saturating_add))
    }
}

/// Returns the bytes that a process, with all of its threads, read from and wrote to storage.
fn read(pid: u32) -> io::Result<u64> {
    let text = super::read(format!("/proc/{pid}/io"))?;
    parse(&text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

fn has_ended(error: &io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    matches!(
        errno,
        Some(rustix::io::Errno::NOENT | rustix::io::Errno::SRCH)
    )
}

fn parse(text: &str) -> Option<u64> {
    let field = |name: &str| -> Option<u64> {
        let mut lines = text.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(key, _)| *key == name)?.1.trim().parse().ok()
    };
    field("read_bytes")?.checked_add(field("write_bytes")?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn bytes_of_storage_are_added() {
        let text = "rchar: 9\nwchar: 8\nsyscr: 7\nsyscw: 6\nread_bytes: 4096\nwrite_bytes: 512\n\
                    cancelled_write_bytes: 100\n";
        assert_eq!(parse(text), Some(4608));
        assert_eq!(parse("rchar: 9\nread_bytes: 4096\n"), None);
        assert_eq!(parse("read_bytes: -1\nwrite_bytes: 0\n"), None);
    }

    #[test]
    fn bytes_of_this_process_are_counted() {
        let mut image = tempfile::Builder::new().tempfile_in(".").unwrap();
        let mut own = OwnIo::begin(std::iter::once(std::process::id()));
        assert_eq!(own.bytes(), Some(0));
        image.write_all(&vec![7; 1 << 20]).unwrap();
        image.as_file().sync_all().unwrap();
        own.read();
        assert!(own.bytes() >= Some(1 << 20), "{:?}", own.bytes());
    }

    #[test]
    fn processes_that_have_ended_add_nothing() {
        let mut own = OwnIo::begin([std::process::id(), u32::MAX].into_iter());
        own.add(u32::MAX);
        own.read();
        assert!(own.bytes().is_some());
        assert_eq!(OwnIo::begin(std::iter::empty()).bytes(), None);
    }
}
