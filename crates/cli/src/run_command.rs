//! `fathom serve --run`: serves a disk while a command runs.
//!
//! The process that the user starts is the parent of the server and of the command's shell. The
//! parent starts the command when the server reports READY=1 (sd_notify(3)), and stops the server
//! when the command has ended.

use crate::serve::ServeArgs;
use crate::temporary_sockets::{NBD, NOTIFY, TEMPORARY, VHOST_USER};
use anyhow::{Context, bail};
use fathom_exports::nbd::Address;
use fathom_spec::SocketSpec;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode, utf8_percent_encode};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;
use std::ffi::{OsStr, OsString};
use std::io::{self, stderr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};

/// Characters that are percent-encoded in a URI's path and query.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'-')
    .remove(b'_')
    .remove(b'.');

/// Maximum length in bytes of a message of the server to its service manager.
const MAX_MESSAGE: usize = 4096;

/// Serves the disk of `args` until `command` has ended, and returns the command's exit status.
///
/// `arguments` is the command line of this process.
pub fn run(args: &ServeArgs, command: &OsStr, arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let dir = tempfile::Builder::new().prefix("fathom-").tempdir();
    let dir = dir.context("cannot create a temporary directory for sockets")?;
    let mut server = Server::start(dir.path(), arguments)?;
    let mut signals = Signals::new()?;
    loop {
        match server.wait(None, &mut signals)? {
            Event::Ready => break,
            Event::ServerEnded => return Ok(code(server.child.wait()?)),
            Event::Signal(number) => {
                server.stop()?;
                return Ok(code(ExitStatus::from_raw(number)));
            }
            Event::CommandEnded => {}
        }
    }
    let shell = Command::new("/bin/sh")
        .arg("-c")
        .arg(command)
        .envs(variables(args, dir.path()))
        .spawn();
    let mut shell = shell.context("cannot start /bin/sh")?;
    let shell_fd = fd_of(shell.id())?;
    let mut has_server_ended = false;
    loop {
        match server.wait(Some(shell_fd.as_fd()), &mut signals)? {
            Event::CommandEnded => break,
            Event::ServerEnded => has_server_ended = true,
            Event::Ready => {}
            Event::Signal(number) => forward(number, &shell_fd),
        }
    }
    let status = shell.wait()?;
    server.stop()?;
    if has_server_ended {
        bail!("the server ended before the command");
    }
    Ok(code(status))
}

/// Returns the environment variables that tell the command the addresses of the disk.
fn variables(args: &ServeArgs, dir: &Path) -> Vec<(&'static str, OsString)> {
    let path_of = |path: &Path, name: &str| match path == Path::new(TEMPORARY) {
        true => dir.join(name),
        false => path.to_owned(),
    };
    let mut variables = Vec::new();
    if let Some(SocketSpec::Path(path)) = &args.of_disk.vhost_user {
        variables.push(("vhost_user", path_of(path, VHOST_USER).into()));
    }
    let implied = Address::Unix(TEMPORARY.into());
    let implied = args.of_disk.vhost_user.is_none().then_some(&implied);
    let Some(address) = args.nbd.first().or(implied) else {
        return variables;
    };
    let address = match address {
        Address::Unix(path) => {
            let path = path_of(path, NBD);
            variables.push(("unixsocket", path.clone().into()));
            Address::Unix(path)
        }
        other => other.clone(),
    };
    let export = args.of_disk.export_name.as_deref().unwrap_or_default();
    if let Some(uri) = uri(&address, export, args.has_tls()) {
        variables.push(("uri", uri.into()));
    }
    variables
}

/// Returns the URI by which clients on this host reach an export, or `None` if it is unknown.
fn uri(address: &Address, export: &str, has_tls: bool) -> Option<String> {
    let scheme = if has_tls { "nbds" } else { "nbd" };
    let export = utf8_percent_encode(export, ENCODED);
    match address {
        Address::Unix(path) => {
            let path = percent_encode(path.as_os_str().as_bytes(), ENCODED);
            Some(format!("{scheme}+unix:///{export}?socket={path}"))
        }
        Address::Tcp { host, port } => {
            let host = match host.as_str() {
                "" | "0.0.0.0" | "::" => "localhost".to_owned(),
                numeric if numeric.contains(':') => format!("[{numeric}]"),
                name => name.to_owned(),
            };
            Some(format!("{scheme}://{host}:{port}/{export}"))
        }
        Address::Vsock { port, .. } => Some(format!("{scheme}+vsock://1:{port}/{export}")),
        Address::Fd(_) | Address::Activated => None,
    }
}

/// The server, a child of this process.
struct Server {
    child: Child,
    /// The process that serves the disk: `child`, or its successor after `fathom upgrade`.
    serving: OwnedFd,
    notify: UnixDatagram,
    is_serving: bool,
}

enum Event {
    Ready,
    ServerEnded,
    CommandEnded,
    Signal(i32),
}

impl Server {
    fn start(dir: &Path, arguments: &[OsString]) -> anyhow::Result<Server> {
        let path = dir.join(NOTIFY);
        let notify = UnixDatagram::bind(&path)?;
        notify.set_nonblocking(true)?;
        let (program, options) = match arguments {
            [program, _serve, options @ ..] => (program, options),
            _ => bail!("--run is an option of `fathom serve`"),
        };
        let child = Command::new("/proc/self/exe")
            .arg0(program)
            .args([
                OsStr::new("serve"),
                OsStr::new("--run-dir"),
                dir.as_os_str(),
            ])
            .args(options)
            .env("NOTIFY_SOCKET", path)
            .stdin(Stdio::null())
            // Standard output belongs to the command.
            .stdout(stderr())
            // A process group of its own: signals of the terminal are meant for the command.
            .process_group(0)
            .spawn()?;
        let serving = fd_of(child.id())?;
        Ok(Server {
            child,
            serving,
            notify,
            is_serving: true,
        })
    }

    /// Waits for the next event. `command` is a pidfd of the command.
    fn wait(
        &mut self,
        command: Option<BorrowedFd>,
        signals: &mut Signals,
    ) -> anyhow::Result<Event> {
        loop {
            // Without a command, `notify` takes the place of the pidfd and is polled for no events.
            let nothing = PollFlags::empty();
            let when = |is_polled| if is_polled { PollFlags::IN } else { nothing };
            let notify = self.notify.as_fd();
            let mut fds = [
                PollFd::new(&self.notify, PollFlags::IN),
                PollFd::from_borrowed_fd(self.serving.as_fd(), when(self.is_serving)),
                PollFd::from_borrowed_fd(command.unwrap_or(notify), when(command.is_some())),
                PollFd::new(signals.delivery.get_read(), PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other?,
            };
            let [is_told, has_ended, is_done, is_signalled] =
                fds.map(|fd| fd.revents().contains(PollFlags::IN));
            if is_signalled {
                match signals.next() {
                    Some(number) => return Ok(Event::Signal(number)),
                    None => continue,
                }
            }
            // A handover is reported before the predecessor ends, so messages are read first.
            if is_told {
                if self.receive()? {
                    return Ok(Event::Ready);
                }
                continue;
            }
            if is_done {
                return Ok(Event::CommandEnded);
            }
            if has_ended {
                self.is_serving = false;
                return Ok(Event::ServerEnded);
            }
        }
    }

    /// Reads a message of the server; returns whether the server is ready.
    fn receive(&mut self) -> anyhow::Result<bool> {
        let mut message = [0; MAX_MESSAGE];
        let length = match self.notify.recv(&mut message) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            other => other?,
        };
        let message = String::from_utf8_lossy(&message[..length]);
        for line in message.lines() {
            if let Some(pid) = line.strip_prefix("MAINPID=") {
                self.serving = fd_of(pid.parse()?)?;
                self.is_serving = true;
            }
        }
        Ok(message.lines().any(|line| line == "READY=1"))
    }

    /// Stops the server and waits for its end.
    fn stop(&mut self) -> anyhow::Result<()> {
        if self.is_serving {
            // The server may have ended in the meantime.
            let _ = pidfd_send_signal(&self.serving, Signal::TERM);
            let mut fds = [PollFd::new(&self.serving, PollFlags::IN)];
            while fds[0].revents().is_empty() {
                match poll(&mut fds, None) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        let status = self.child.wait()?;
        match status.success() {
            true => Ok(()),
            false => bail!("the server failed ({status})"),
        }
    }
}

/// Signals that this process handles. By default, they would end the process.
struct Signals {
    delivery: SignalDelivery<UnixStream, SignalOnly>,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        let (read, write) = UnixStream::pair()?;
        let caught = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];
        let delivery = SignalDelivery::with_pipe(read, write, SignalOnly, caught)?;
        Ok(Signals { delivery })
    }

    fn next(&mut self) -> Option<i32> {
        self.delivery.pending().next()
    }
}

/// Forwards a signal to the command.
fn forward(signal: i32, command: &OwnedFd) {
    let signal = match signal {
        SIGTERM => Signal::TERM,
        SIGHUP => Signal::HUP,
        // The terminal sends the other signals to the command, too.
        _ => return,
    };
    // The command may have ended in the meantime.
    let _ = pidfd_send_signal(command, signal);
}

fn fd_of(pid: u32) -> anyhow::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.context("not a process id")?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Returns the exit status that a shell reports for a command.
fn code(status: ExitStatus) -> ExitCode {
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_name_the_export_for_clients_on_this_host() {
        let tcp = |host: &str| Address::Tcp {
            host: host.into(),
            port: 10809,
        };
        for (address, export, has_tls, expected) in [
            (
                Address::Unix("/tmp/a b/s".into()),
                "",
                false,
                "nbd+unix:///?socket=/tmp/a%20b/s",
            ),
            (
                Address::Unix("/s".into()),
                "x/&y",
                true,
                "nbds+unix:///x/%26y?socket=/s",
            ),
            (tcp(""), "", false, "nbd://localhost:10809/"),
            (tcp("0.0.0.0"), "e", false, "nbd://localhost:10809/e"),
            (tcp("::1"), "e", true, "nbds://[::1]:10809/e"),
            (
                Address::Vsock { cid: 2, port: 9 },
                "e",
                false,
                "nbd+vsock://1:9/e",
            ),
        ] {
            assert_eq!(uri(&address, export, has_tls).as_deref(), Some(expected));
        }
        assert_eq!(uri(&Address::Fd(3), "", false), None);
    }
}
