//! The permissions of a tenant: the files and connections that the definitions of its disks name,
//! and no others.

use fathom_files::gate::{self, Got, Refused, Wanted};
use fathom_files::lasting::lasting_id;
use fathom_files::superseded;
use fathom_filters::{COW, Spec};
use fathom_nbd::NbdUri;
use fathom_requests::{Ask, Command};
use fathom_sockets::Listener;
use fathom_spec::DiskSpec;
use fathom_stack::AllowedDirs;
use fathom_storage::cached::Terms;
use fathom_storage::{Location, refusal_of};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum timeout for a connection to a server.
const MAX_PATIENCE: Duration = Duration::from_secs(60);
/// Maximum number of rings of a trace. A trace has one ring for each worker of its disk.
const MAX_RINGS: usize = 256;
/// Maximum number of files that an image's layers name.
const MAX_FOUND: usize = 1024;

/// The permissions for one disk.
struct Permit {
    table: DiskSpec,
    /// The image's path as the user wrote it, and without symbolic links.
    image: Vec<PathBuf>,
    /// Whether the path without symbolic links has been determined.
    is_resolved: bool,
    /// Paths of the files that the image's layers name.
    found: Vec<PathBuf>,
    /// Whether the disk is being opened, so that all of its files may be opened. Afterwards, the
    /// process has what it needs, and a compromised process gets no further files.
    is_opening: bool,
    /// Options to which the disk is being changed, and for which its files may be opened again.
    change: Option<DiskSpec>,
    listener: Option<Arc<Listener>>,
    traces: Vec<PathBuf>,
    logs: Vec<PathBuf>,
    /// Times at which the tenant got connections to keepers of base images.
    bases: Vec<Instant>,
}

/// Maximum number of connections to keepers in this time. Each connection uses resources of a
/// keeper that other servers need, too.
const MAX_BASES: usize = 30;
const WHILE: Duration = Duration::from_secs(60);

/// Why a request of a tenant fails.
#[derive(Debug)]
pub enum Denied {
    /// The tenant does not have the permission.
    Forbidden,
    Failed(Refused),
}

impl From<Refused> for Denied {
    fn from(refused: Refused) -> Denied {
        Denied::Failed(refused)
    }
}

impl From<io::Error> for Denied {
    fn from(error: io::Error) -> Denied {
        Denied::Failed(error.into())
    }
}

impl From<Denied> for Refused {
    fn from(denied: Denied) -> Refused {
        match denied {
            Denied::Forbidden => io::Error::from_raw_os_error(libc::EPERM).into(),
            Denied::Failed(refused) => refused,
        }
    }
}

/// The permissions of one tenant, by the names of its disks.
#[derive(Default)]
pub struct Permits(Mutex<BTreeMap<String, Permit>>);

impl Permits {
    /// Permits opening the disk's files.
    pub fn begin(&self, table: &DiskSpec, listener: Option<Arc<Listener>>) {
        let image = table.image.path();
        let permit = Permit {
            image: image.map(Path::to_owned).into_iter().collect(),
            is_resolved: false,
            found: Vec::new(),
            is_opening: true,
            change: None,
            listener,
            traces: table.trace.clone().into_iter().collect(),
            logs: table.filters.iter().filter_map(log_file).collect(),
            bases: Vec::new(),
            table: table.clone(),
        };
        self.0.lock().insert(table.name.clone(), permit);
    }

    /// Returns the paths of the files that the disk's image names.
    pub fn found(&self, disk: &str) -> Vec<PathBuf> {
        let disks = self.0.lock();
        let found = disks.get(disk).map(|permit| permit.found.clone());
        found.unwrap_or_default()
    }

    /// Adds a disk whose files are open already, with what a predecessor knew about it.
    pub fn resume(&self, table: &DiskSpec, listener: Option<Arc<Listener>>, found: Vec<PathBuf>) {
        self.begin(table, listener);
        if let Some(permit) = self.0.lock().get_mut(&table.name) {
            permit.found = found;
            permit.is_opening = false;
        }
    }

    /// Ends the permission to open the disk's files, because they are open.
    pub fn seal(&self, disk: &str) {
        if let Some(permit) = self.0.lock().get_mut(disk) {
            permit.is_opening = false;
        }
    }

    /// Permits opening a disk's files again for a change of its options, if the files are the same.
    pub fn begin_change(&self, wanted: &DiskSpec) {
        if let Some(permit) = self.0.lock().get_mut(&wanted.name) {
            let is = &permit.table;
            let is_same = (&is.image, &is.data_file) == (&wanted.image, &wanted.data_file);
            permit.change = is_same.then(|| wanted.clone());
        }
    }

    /// Ends a change. `is_changed`: whether the disk now has the new options.
    pub fn end_change(&self, disk: &str, is_changed: bool) {
        if let Some(permit) = self.0.lock().get_mut(disk)
            && let Some(change) = permit.change.take()
            && is_changed
        {
            permit.table = change;
        }
    }

    /// Whether the tenant has this disk.
    pub fn has(&self, disk: &str) -> bool {
        self.0.lock().contains_key(disk)
    }

    pub fn forget(&self, disk: &str) {
        self.0.lock().remove(disk);
    }

    /// Permits opening the files that a command names.
    pub fn extend(&self, ask: &Ask) {
        let mut disks = self.0.lock();
        let Some(permit) = ask.about().and_then(|name| disks.get_mut(name)) else {
            return;
        };
        match &ask.command {
            Command::Trace { file: Some(file) } => permit.traces = vec![file.clone()],
            Command::Set {
                filter, options, ..
            } if filter.starts_with(LOG) => {
                permit.logs.extend(options.get("file").map(PathBuf::from))
            }
            Command::Put { options, .. } => {
                permit
                    .logs
                    .extend(options.filters.iter().filter_map(log_file));
            }
            _ => {}
        }
    }

    /// Determines the paths of images without symbolic links. A file system may never reply, so the
    /// calling thread must have nothing else to do. No lock is held meanwhile.
    fn resolve(&self) {
        let disks = self.0.lock();
        let unresolved = disks.iter().filter(|(_, permit)| !permit.is_resolved);
        let unresolved: Vec<_> = unresolved
            .map(|(name, permit)| (name.clone(), permit.image.first().cloned()))
            .collect();
        drop(disks);
        for (name, path) in unresolved {
            let real = path.as_ref().and_then(|path| path.canonicalize().ok());
            if let Some(permit) = self.0.lock().get_mut(&name)
                && permit.image.first() == path.as_ref()
            {
                permit.is_resolved = true;
                permit.image.extend(real);
            }
        }
    }

    fn allow(&self, wanted: &Wanted) -> bool {
        let allows = || self.0.lock().values().any(|permit| permit.allows(wanted));
        allows() || {
            self.resolve();
            allows()
        }
    }

    /// Records a file that was found, so that the tenant may later check whether the file still
    /// exists.
    fn has_found(&self, wanted: &Wanted, path: &Path) {
        let mut disks = self.0.lock();
        let all = disks.values_mut().filter(|permit| permit.allows(wanted));
        for Permit { found, .. } in all {
            if found.len() < MAX_FOUND && !found.iter().any(|other| other == path) {
                found.push(path.to_owned());
            }
        }
    }

    /// Opens a file for the tenant, or connects, if the tenant has the permission.
    pub fn get(&self, wanted: &Wanted, with: Option<BorrowedFd<'_>>) -> Result<Got, Denied> {
        let got = |file| Got { file, path: None };
        if let Wanted::FrontEnds { disk } = wanted {
            let disks = self.0.lock();
            let listener = disks.get(disk).and_then(|permit| permit.listener.as_ref());
            let listener = listener.ok_or(Denied::Forbidden)?;
            return Ok(got(listener.as_fd().try_clone_to_owned()?));
        }
        if !self.allow(wanted) {
            return Err(Denied::Forbidden);
        }
        match wanted {
            Wanted::Named {
                image,
                more,
                layer,
                name,
            } => {
                let dirs = AllowedDirs::for_other(image, more);
                let found = dirs.and_then(|dirs| dirs.open(layer, name));
                let (path, file) = found.map_err(|error| Refused {
                    errno: None,
                    text: problem_of(error),
                })?;
                self.has_found(wanted, &path);
                Ok(Got {
                    file: file.into(),
                    path: Some(path),
                })
            }
            Wanted::Server { uri, patience_ms } => {
                let patience = Duration::from_millis(*patience_ms).min(MAX_PATIENCE);
                let socket = fathom_storage::connect(uri, Instant::now() + patience)?;
                Ok(got(socket))
            }
            Wanted::Base { remote } => {
                let mut disks = self.0.lock();
                let permit = disks.values_mut().find(|permit| permit.allows(wanted));
                let permit = permit.ok_or(Denied::Forbidden)?;
                permit.bases.retain(|then| then.elapsed() < WHILE);
                if permit.bases.len() >= MAX_BASES {
                    return Err(io::Error::from_raw_os_error(libc::EAGAIN).into());
                }
                permit.bases.push(Instant::now());
                let cache = permit.table.cache_terms();
                drop(disks);
                let terms = Terms::new(remote.clone(), cache);
                Ok(got(fathom_storage::cached::finder::find_here(&terms)?))
            }
            Wanted::Trace { path, disk, rings } => {
                let (_dir, path) = gate::below_trusted_dir(path)?;
                let file = fathom_host::prepare_trace(&path, disk, *rings);
                let file = file.map_err(|error| Refused {
                    errno: None,
                    text: error.to_string(),
                })?;
                Ok(got(file.into()))
            }
            Wanted::Place { .. } => {
                let file = File::from(wanted.fulfil_for_other(with)?);
                let id = lasting_id(&file)?;
                Ok(Got {
                    file: file.into(),
                    path: id.map(PathBuf::from),
                })
            }
            wanted @ Wanted::Image { path, write: true } => {
                let file = File::from(wanted.fulfil_for_other(with)?);
                self.take_mark(wanted, path, &file)?;
                Ok(got(file.into()))
            }
            wanted => Ok(got(wanted.fulfil_for_other(with)?)),
        }
    }

    /// Rejects an image that a newer one has superseded, or removes its mark, as the disk's options
    /// say. The tenant's process may not have the rights to read or remove the mark.
    fn take_mark(&self, wanted: &Wanted, path: &Path, file: &File) -> Result<(), Refused> {
        let image = superseded::Image {
            location: &path.to_string_lossy(),
            file: Some(file),
            id: None,
        };
        let Some(mark) = image.mark() else {
            return Ok(());
        };
        let disks = self.0.lock();
        let is_allowed =
            { disks.values() }.any(|permit| permit.allows(wanted) && permit.table.allow_superseded);
        drop(disks);
        let problem = match is_allowed {
            true => image.clear_mark().err(),
            false => Some(refusal_of(&mark)),
        };
        problem.map_or(Ok(()), |text| Err(Refused { errno: None, text }))
    }
}

impl Permit {
    fn allows(&self, wanted: &Wanted) -> bool {
        let is_image = |path: &PathBuf| self.image.contains(path);
        let is_data = |path: &PathBuf| self.table.data_file.as_ref() == Some(path);
        // The options for which the disk's files may be opened now.
        let opening = match self.is_opening {
            true => Some(&self.table),
            false => self.change.as_ref(),
        };
        match wanted {
            // The new file descriptor has no more access than the tenant's own.
            Wanted::Again { .. } => true,
            Wanted::Place { path } => is_image(path) || is_data(path) || self.found.contains(path),
            Wanted::Append { path } => self.logs.contains(path),
            Wanted::Trace { path, rings, .. } => *rings <= MAX_RINGS && self.traces.contains(path),
            Wanted::Server { uri, .. } => self.table.is_server(uri),
            Wanted::Record { path } => opening.is_some_and(|table| {
                table.pull.is_some() && table.pull_record_path().as_ref() == Some(path)
            }),
            Wanted::Base { remote } => {
                let below = self.table.base.as_deref().map(Location::cached);
                let is = |location: &Location| location.remote() == Some(remote);
                is(&self.table.image) || below.is_some_and(|below| below.as_ref().is_ok_and(is))
            }
            Wanted::Certificates { uri, path } => self.table.is_server(uri) && are_for(uri, path),
            Wanted::Image { path, write } => opening.is_some_and(|table| {
                let has_overlay = table.filters.iter().any(|spec| spec.name == COW.name);
                let may_write = !table.readonly && !has_overlay;
                (is_image(path) || is_data(path)) && (may_write || !write)
            }),
            Wanted::Named { image, more, .. } => {
                opening.is_some_and(|table| is_image(image) && *more == table.allow_dirs)
            }
            Wanted::Unnamed { dir } => opening.is_some_and(|table| {
                let overlay = table.filters.iter().find_map(overlay_dir);
                overlay.as_ref() == Some(dir)
            }),
            Wanted::FrontEnds { .. } => false,
        }
    }
}

/// Whether a client of this NBD server needs the file for TLS.
fn are_for(uri: &str, path: &Path) -> bool {
    let uri: Result<NbdUri, _> = uri.parse();
    let terms = uri.ok().and_then(|uri| uri.tls().cloned());
    terms.is_some_and(|terms| terms.files().all().any(|file| file == path))
}

const LOG: &str = "log";

fn log_file(spec: &Spec) -> Option<PathBuf> {
    option(spec, LOG, "file").map(PathBuf::from)
}

fn overlay_dir(spec: &Spec) -> Option<PathBuf> {
    let default = || (spec.name == COW.name).then(|| COW.options[0].default.unwrap_or_default());
    let dir = option(spec, COW.name, "dir").or_else(default)?;
    Some(dir.into())
}

fn option<'a>(spec: &'a Spec, filter: &str, key: &str) -> Option<&'a str> {
    let mut options = spec.options.iter().filter(|_| spec.name == filter);
    options
        .find(|(other, _)| other == key)
        .map(|(_, value)| &**value)
}

/// Returns the text of an error without the image's name, which the tenant adds.
fn problem_of(error: fathom_core::DiskError) -> String {
    match error {
        fathom_core::DiskError::Unusable { problem, .. } => problem,
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Adding a disk does not wait for the file system of its image.
    #[test]
    fn path_without_links_is_looked_for_when_it_is_needed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["old", "new"] {
            fs::write(path(name), [0; 512]).unwrap();
        }
        std::os::unix::fs::symlink(path("old"), path("image")).unwrap();
        let text = format!(r#"{{"name": "a", "image": {:?}}}"#, path("image"));
        let permits = Permits::default();
        permits.begin(&serde_json::from_str(&text).unwrap(), None);
        fs::remove_file(path("image")).unwrap();
        std::os::unix::fs::symlink(path("new"), path("image")).unwrap();
        let place = |name| {
            permits
                .get(&Wanted::Place { path: path(name) }, None)
                .is_ok()
        };
        assert!(place("image") && place("new") && !place("old"));
    }

    #[test]
    fn tenant_gets_files_of_its_disks_only_while_they_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["own", "base", "other"] {
            fs::write(path(name), [0; 512]).unwrap();
        }
        let text = format!(
            r#"{{"name": "a", "image": {:?}, "format": "qcow2", "filters": ["log:file={}"]}}"#,
            path("own"),
            path("log").display()
        );
        let table: DiskSpec = serde_json::from_str(&text).unwrap();
        let permits = Permits::default();
        let image = |name: &str, write| Wanted::Image {
            path: path(name),
            write,
        };
        let named = |first: &str, layer: PathBuf, name: &str| Wanted::Named {
            image: path(first),
            more: Vec::new(),
            layer,
            name: name.into(),
        };
        let far = || named("own", path("own"), "/etc/hostname");
        let append = |name: &str| Wanted::Append { path: path(name) };
        let may = |wanted: &Wanted| permits.get(wanted, None).is_ok();
        assert!(!may(&image("own", false)));
        permits.begin(&table, None);
        assert!(may(&image("own", true)) && may(&named("own", path("own"), "base")));
        assert!(may(&append("log")) && may(&Wanted::Place { path: path("own") }));
        // Only the disk's own directory is permitted, even if the tenant names layers elsewhere.
        assert!(!may(&far()) && !may(&named("own", "/etc/x".into(), "hostname")));
        assert!(!may(&named("/", path("own"), "etc/hostname")));
        assert!(!may(&image("other", false)) && !may(&append("other")));
        assert!(!may(&Wanted::FrontEnds { disk: "a".into() }));
        let server = Wanted::Server {
            uri: "nbd://127.0.0.1".into(),
            patience_ms: 1,
        };
        assert!(!may(&server));
        permits.seal("a");
        let place = |name: &str| Wanted::Place { path: path(name) };
        assert!(may(&place("base")) && !may(&place("other")));
        assert!(!may(&image("own", true)) && !may(&named("own", path("own"), "base")));
        assert!(may(&append("log")));
        permits.forget("a");
        assert!(!may(&append("log")));
    }

    #[test]
    fn certificates_are_those_of_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["ca-cert.pem", "client-key.pem", "other-key.pem"] {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        let uri = |host: &str| {
            let dir = dir.path().display();
            format!("nbds://{host}/x?tls-certificates={dir}")
        };
        let text = format!(r#"{{"name": "a", "image": "{}"}}"#, uri("host"));
        let table: DiskSpec = serde_json::from_str(&text).unwrap();
        let permits = Permits::default();
        permits.begin(&table, None);
        let may = |uri: String, name: &str| {
            let path = dir.path().join(name);
            permits
                .get(&Wanted::Certificates { uri, path }, None)
                .is_ok()
        };
        assert!(may(uri("host"), "ca-cert.pem") && may(uri("host"), "client-key.pem"));
        assert!(!may(uri("host"), "other-key.pem") && !may(uri("elsewhere"), "ca-cert.pem"));
        assert!(!may("nbd://host/x".into(), "ca-cert.pem"));
    }

    #[test]
    fn a_change_opens_the_same_image_until_it_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["own", "other"] {
            fs::write(path(name), [0; 512]).unwrap();
        }
        let table = |name: &str, readonly: bool| -> DiskSpec {
            let text = format!(
                r#"{{"name": "a", "image": {:?}, "readonly": {readonly}}}"#,
                path(name)
            );
            serde_json::from_str(&text).unwrap()
        };
        let permits = Permits::default();
        permits.begin(&table("own", false), None);
        permits.seal("a");
        let may = |name: &str, write| {
            let path = path(name);
            permits.get(&Wanted::Image { path, write }, None).is_ok()
        };
        permits.begin_change(&table("other", false));
        assert!(!may("other", false) && !may("own", false));
        permits.begin_change(&table("own", true));
        assert!(may("own", false) && !may("own", true) && !may("other", false));
        permits.end_change("a", true);
        assert!(!may("own", false));
        permits.begin_change(&table("own", false));
        assert!(may("own", true));
        permits.end_change("a", false);
        assert!(!may("own", true));
    }

    #[test]
    fn who_may_only_read_does_not_write() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        fs::write(&path, [0; 512]).unwrap();
        for (more, may_write) in [
            ("", true),
            (r#", "readonly": true"#, false),
            (r#", "filters": ["cow"]"#, false),
        ] {
            let text = format!(r#"{{"name": "a", "image": {path:?}{more}}}"#);
            let permits = Permits::default();
            permits.begin(&serde_json::from_str(&text).unwrap(), None);
            let path = path.clone();
            let wanted = Wanted::Image { path, write: true };
            assert_eq!(permits.get(&wanted, None).is_ok(), may_write, "{more}");
        }
    }
}
