//! Where the API's clients connect, and where they look for it.

use super::rights::Groups;
use crate::error::Error;
use crate::handover::DoorState;
use crate::options::{ApiOptions, RemoteOptions};
use fathom_client::place;
use fathom_sockets::{Access, Bound, Descriptors, Listener, occupant};
use fathom_sockets::{Wanted, make_parent_of, path_of};
use fathom_spec::SocketSpec;
use fathom_tls::{TlsError, server_config};
use fathom_units::cause;
use rustix::net::AddressFamily;
use rustix::process::geteuid;
use rustls::ServerConfig;
use std::fs::{self, DirBuilder, symlink_metadata};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const API: Wanted = Wanted {
    option: "--api",
    families: &[AddressFamily::UNIX],
    kind: "Unix stream socket",
};

/// Listening; the socket and the entry by which it is found are removed when this is dropped.
pub struct Door {
    listener: Listener,
    /// For those who may see what there is to see, by TCP.
    web: Option<TcpListener>,
    /// For those from other hosts.
    remote: Option<RemoteDoor>,
    path: PathBuf,
    _entry: Option<Entry>,
}

impl Door {
    /// Where the user wants it, or else where clients look for it; there, a server that has no such
    /// place goes on without.
    pub fn open(options: &ApiOptions) -> Result<Option<Door>, Error> {
        let entry = place::entry_of(std::process::id());
        let web = options.http.as_deref();
        let web = web.map(|address| listen("--http", address)).transpose()?;
        let remote = options.remote.as_ref().map(RemoteDoor::open).transpose()?;
        let Some(spec) = &options.socket else {
            let Some(entry) = entry else {
                let problem = "no API socket: XDG_RUNTIME_DIR is not set; set it, or name a socket with \
                     --api";
                if web.is_some() || remote.is_some() {
                    return Err(Error::Options(problem.to_owned()));
                }
                tracing::warn!("{problem}");
                return Ok(None);
            };
            let is_asked_for = web.is_some() || remote.is_some();
            return match at_entry(entry, web, remote) {
                Err(error) if !is_asked_for => {
                    tracing::warn!(
                        "the server has no API, so fathom's commands cannot reach it: {error}"
                    );
                    Ok(None)
                }
                door => door.map(Some),
            };
        };
        let (listener, path) = listen_for_clients(spec, access(options.groups))?;
        let entry = entry.and_then(|entry| Entry::make(entry, &path));
        Ok(Some(Door {
            listener,
            web,
            remote,
            path,
            _entry: entry,
        }))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where it is seen by TCP.
    pub fn web_address(&self) -> Option<SocketAddr> {
        self.web.as_ref().and_then(|web| web.local_addr().ok())
    }

    /// That socket once more.
    pub fn web(&self) -> io::Result<Option<TcpListener>> {
        self.web.as_ref().map(TcpListener::try_clone).transpose()
    }

    /// Where it is asked from other hosts.
    pub fn remote_address(&self) -> Option<SocketAddr> {
        let remote = self.remote.as_ref()?;
        remote.listener.local_addr().ok()
    }

    /// That once more.
    pub fn remote(&self) -> io::Result<Option<RemoteDoor>> {
        self.remote.as_ref().map(RemoteDoor::try_clone).transpose()
    }

    /// The sockets, for a successor.
    pub fn hand_over(&self, files: &mut Descriptors) -> io::Result<DoorState> {
        Ok(DoorState {
            listener: self.listener.hand_over(files)?,
            web: { self.web.as_ref() }
                .map(|web| files.add(web))
                .transpose()?,
            remote: { self.remote.as_ref() }
                .map(|remote| files.add(&remote.listener))
                .transpose()?,
        })
    }

    /// That of the predecessor `pid`, which is found by this process's id from now on; `spec`: where
    /// the user wants it.
    pub fn adopt(pid: u32, adopted: Adopted, spec: Option<SocketSpec>) -> Door {
        let Adopted {
            listener,
            mut bound,
            web,
            remote,
        } = adopted;
        let path = match spec {
            Some(SocketSpec::Path(path)) => Some(path),
            Some(_) => path_of(listener.as_fd()),
            None => None,
        };
        let entry = place::entry_of(std::process::id());
        let renamed = entry.filter(|entry| {
            let old = place::entry_of(pid);
            old.is_some_and(|old| fs::rename(old, entry).is_ok())
        });
        let (path, entry) = match (path, renamed) {
            (Some(path), entry) => (path, entry.map(Entry)),
            (None, Some(entry)) => {
                bound.renamed(entry.clone());
                (entry, None)
            }
            (None, None) => {
                tracing::warn!(
                    "API: the entry in XDG_RUNTIME_DIR is missing, so 'fathom list' does not \
                     find this server"
                );
                (bound.path().unwrap_or(Path::new("")).to_owned(), None)
            }
        };
        listener.own(bound);
        Door {
            listener,
            web,
            remote,
            path,
            _entry: entry,
        }
    }
}

/// Where clients from other hosts connect, and what they are shown and have to show.
pub struct RemoteDoor {
    pub listener: TcpListener,
    pub tls: Arc<ServerConfig>,
}

impl RemoteDoor {
    fn open(options: &RemoteOptions) -> Result<RemoteDoor, Error> {
        let tls = RemoteDoor::certificates(options).map_err(|e| Error::Options(e.to_string()))?;
        let listener = listen("--api-listen", &options.listen)?;
        Ok(RemoteDoor { listener, tls })
    }

    fn certificates(options: &RemoteOptions) -> Result<Arc<ServerConfig>, TlsError> {
        let file = |name| options.certificates.join(name);
        server_config(
            &file("server-cert.pem"),
            &file("server-key.pem"),
            Some(&file("ca-cert.pem")),
        )
    }

    fn try_clone(&self) -> io::Result<RemoteDoor> {
        Ok(RemoteDoor {
            listener: self.listener.try_clone()?,
            tls: self.tls.clone(),
        })
    }
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Where there are groups, clients are told apart when they have connected.
fn access(groups: Groups) -> Access {
    match groups == Groups::default() {
        true => Access::PRIVATE,
        false => Access {
            mode: Some(0o666),
            group: None,
        },
    }
}

/// A predecessor's sockets.
pub struct Adopted {
    listener: Listener,
    bound: Bound,
    web: Option<TcpListener>,
    remote: Option<RemoteDoor>,
}

impl Adopted {
    /// `options`: what is to be from now on. Certificates are read anew.
    pub fn new(
        state: DoorState,
        options: &ApiOptions,
        files: &mut Descriptors,
    ) -> Result<Adopted, String> {
        let (listener, bound) = Listener::adopt(state.listener, files)?;
        let web = state.web.map(|web| files.take(web)).transpose()?;
        let remote = state.remote.map(|number| files.take(number)).transpose()?;
        if remote.is_none() && options.remote.is_some() {
            tracing::warn!(
                "API: --api-listen is new in the configuration; other hosts cannot connect until \
                 the server restarts"
            );
        }
        let remote = remote.zip(options.remote.as_ref());
        let remote = remote.map(|(listener, options)| {
            let tls = RemoteDoor::certificates(options).map_err(|error| error.to_string())?;
            let listener = TcpListener::from(listener);
            Ok::<_, String>(RemoteDoor { listener, tls })
        });
        Ok(Adopted {
            listener,
            bound,
            web: web.map(TcpListener::from),
            remote: remote.transpose()?,
        })
    }
}

/// Listens for clients of the API. Returns the path at which they connect, too.
fn listen_for_clients(spec: &SocketSpec, access: Access) -> Result<(Listener, PathBuf), Error> {
    let listener = match spec {
        SocketSpec::Path(path) => {
            make_parent_of(path).map_err(Error::io("cannot create the directory of a socket"))?;
            return Ok((Listener::bind(path, access)?, path.clone()));
        }
        SocketSpec::Fd(fd) => API.inherited(*fd)?,
        SocketSpec::Activated => {
            let problem = "an inherited API socket must be given as a path or fd:N";
            return Err(API.problem(problem).into());
        }
    };
    let path = path_of(listener.as_fd());
    let path = path.ok_or_else(|| API.problem(format!("{spec}: the socket has no path")))?;
    Ok((listener, path))
}

fn listen(option: &str, address: &str) -> Result<TcpListener, Error> {
    let failed = |problem: String| Error::Options(format!("{option} {address}: {problem}"));
    let found = addresses(address).map_err(failed)?;
    let socket = TcpListener::bind(&found[..]).map_err(|error| {
        failed(match error.kind() {
            ErrorKind::AddrInUse => {
                let by = found.first().map(|address| occupant::at_tcp(*address));
                let by = by.unwrap_or_default();
                format!("in use by {by}; {}", occupant::remedy(&by, "port"))
            }
            _ => format!("cannot listen: {}", cause(error)),
        })
    })?;
    let nonblocking = socket.set_nonblocking(true);
    nonblocking
        .map_err(|error| failed(format!("cannot set the socket's options: {}", cause(error))))?;
    Ok(socket)
}

/// Looks up a HOST:PORT to listen at.
fn addresses(text: &str) -> Result<Vec<SocketAddr>, String> {
    let port = text.strip_prefix(':').unwrap_or(text);
    if port.parse::<u16>().is_ok() {
        return Err(format!(
            "names no host; write '[::]:{port}' to listen at all addresses of this machine, or '127.0.0.1:{port}'"
        ));
    }
    if !text.contains(':') {
        return Err("names no port; write HOST:PORT, such as 127.0.0.1:9825".into());
    }
    let found = text.to_socket_addrs();
    let found =
        found.map_err(|error| format!("cannot look up the host's address: {}", cause(error)))?;
    Ok(found.collect())
}

fn at_entry(
    entry: PathBuf,
    web: Option<TcpListener>,
    remote: Option<RemoteDoor>,
) -> Result<Door, Error> {
    prepare(&entry).map_err(Error::io(
        "cannot prepare the directory of the API's socket",
    ))?;
    Ok(Door {
        listener: Listener::bind(&entry, Access::PRIVATE)?,
        web,
        remote,
        path: entry,
        _entry: None,
    })
}

/// A symbolic link to a socket that is elsewhere.
struct Entry(PathBuf);

impl Entry {
    /// None: it cannot be made. The server can be reached without.
    fn make(entry: PathBuf, socket: &Path) -> Option<Entry> {
        let made = prepare(&entry).and_then(|()| {
            // Of servers that were killed: one with this process's id, and one that was at this socket.
            if let Err(error) = fs::remove_file(&entry)
                && error.kind() != ErrorKind::NotFound
            {
                return Err(error);
            }
            let socket = std::path::absolute(socket)?;
            if let Some(dir) = entry.parent() {
                remove_links_to(&socket, dir);
            }
            symlink(socket, &entry)
        });
        match made {
            Ok(()) => Some(Entry(entry)),
            Err(error) => {
                let entry = entry.display();
                tracing::warn!(
                    "{entry}: cannot create the entry, so 'fathom list' does not find this \
                     server: {}",
                    cause(error)
                );
                None
            }
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Somebody may have done it.
        let _ = fs::remove_file(&self.0);
    }
}

/// Makes the directory of the entries, if need be, and room in it.
fn prepare(entry: &Path) -> io::Result<()> {
    let Some(dir) = entry.parent() else {
        return Ok(());
    };
    make_parent_of(dir)?;
    make_private_dir(dir)?;
    remove_stale(dir);
    Ok(())
}

/// Whoever made them is at this socket no more.
fn remove_links_to(socket: &Path, dir: &Path) {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let is_link = |entry: &PathBuf| fs::read_link(entry).is_ok_and(|to| to == socket);
    for entry in entries.map(|entry| entry.path()).filter(is_link) {
        // Somebody else may do it just now.
        let _ = fs::remove_file(entry);
    }
}

/// Make a directory for its owner only.
fn make_private_dir(dir: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        other => return other,
    }
    let metadata = symlink_metadata(dir)?;
    let owned = metadata.is_dir() && metadata.uid() == geteuid().as_raw();
    if owned && metadata.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{}: not a directory that only its owner may use; run chmod 700 on it, or remove it",
        dir.display()
    )))
}

/// Remove the entries of servers that were killed: those named after a
/// process that does not exist, at which nobody listens.
fn remove_stale(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_dead = |pid| !Path::new("/proc").join(format!("{pid}")).exists();
        let is_unheard = |error: io::Error| {
            [ErrorKind::ConnectionRefused, ErrorKind::NotFound].contains(&error.kind())
        };
        if place::pid_of(&path).is_some_and(is_dead)
            && UnixStream::connect(&path).is_err_and(is_unheard)
        {
            // Another server that starts may have done it.
            let _ = fs::remove_file(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    fn the_entries_of_killed_servers_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        // No process has so great an id (PID_MAX_LIMIT is 2^22).
        let dead = dir.path().join("4999999.sock");
        let elsewhere = dir.path().join("4999998.sock");
        let dangling = dir.path().join("4999997.sock");
        let linked = dir.path().join("4999996.sock");
        let own = dir.path().join(format!("{}.sock", std::process::id()));
        let other = dir.path().join("other.sock");
        let _live = UnixListener::bind(&elsewhere).unwrap();
        for path in [&dead, &own, &other] {
            drop(UnixListener::bind(path).unwrap());
        }
        symlink(dir.path().join("nothing"), &dangling).unwrap();
        symlink(&elsewhere, &linked).unwrap();
        remove_stale(dir.path());
        assert!(!dead.exists() && symlink_metadata(dangling).is_err());
        assert!(
            [elsewhere, linked, own, other]
                .iter()
                .all(|path| path.exists())
        );
    }

    #[test]
    fn who_comes_to_a_killed_servers_socket_is_found_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        make_private_dir(&path).unwrap();
        let socket = dir.path().join("api.sock");
        let _live = UnixListener::bind(&socket).unwrap();
        let (killed, other) = (path.join("1.sock"), path.join("2.sock"));
        symlink(&socket, &killed).unwrap();
        let elsewhere = dir.path().join("other.sock");
        let _other = UnixListener::bind(&elsewhere).unwrap();
        symlink(&elsewhere, &other).unwrap();
        let own = path.join("3.sock");
        let _entry = Entry::make(own.clone(), &socket).unwrap();
        assert!(symlink_metadata(&killed).is_err());
        assert!(other.exists() && own.exists());
    }

    #[test]
    fn only_private_directories_are_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fathom");
        make_private_dir(&path).unwrap();
        assert_eq!(symlink_metadata(&path).unwrap().mode() & 0o777, 0o700);
        make_private_dir(&path).unwrap();
        let open = fs::Permissions::from_mode(0o750);
        fs::set_permissions(&path, open).unwrap();
        assert!(make_private_dir(&path).is_err());
        let link = dir.path().join("link");
        symlink(dir.path(), &link).unwrap();
        assert!(make_private_dir(&link).is_err());
    }
}
