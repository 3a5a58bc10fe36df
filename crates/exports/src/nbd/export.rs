//! Exports: the disks that clients may choose from.

use super::connection::ExportView;
use super::moving::Moving;
use crate::watch::{Visit, Watch};
use fathom_core::{Disk, Source, SourceId, WorkerHandle};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A disk with its export name.
pub struct Export {
    name: String,
    description: String,
    disk: Arc<dyn Disk>,
    workers: Arc<[WorkerHandle]>,
    /// Set if another server may take over the disk; clients can then only read.
    moving: Option<Arc<Moving>>,
    watch: Option<Watch>,
    /// Name of the dirty bitmap that block status reports.
    bitmap: Option<String>,
    /// Number of connections of each worker.
    loads: Mutex<Box<[usize]>>,
}

impl Export {
    /// Creates an export of `disk`, which `workers` serve. The disk must accept requests of any
    /// alignment, as the storages' `ByteDisk` does. Name and description have at most 4096 bytes
    /// each and no NUL.
    pub fn new(
        name: String,
        description: String,
        disk: Arc<dyn Disk>,
        workers: Arc<[WorkerHandle]>,
    ) -> Export {
        Export {
            name,
            description,
            disk,
            loads: Mutex::new(vec![0; workers.len()].into()),
            workers,
            moving: None,
            watch: None,
            bitmap: None,
        }
    }

    /// Allows another server to take over the disk.
    pub fn movable(self, moving: Arc<Moving>) -> Export {
        Export {
            moving: Some(moving),
            ..self
        }
    }

    pub(super) fn moving(&self) -> Option<&Arc<Moving>> {
        self.moving.as_ref()
    }

    /// Exposes the dirty bitmap `name` of the disk as a metadata context.
    pub fn with_bitmap(self, name: String) -> Export {
        Export {
            bitmap: Some(name),
            ..self
        }
    }

    pub(super) fn bitmap(&self) -> Option<&str> {
        self.bitmap.as_deref()
    }

    /// Sets a callback that is notified of the export's clients.
    pub fn watched(self, watch: Watch) -> Export {
        Export {
            watch: Some(watch),
            ..self
        }
    }

    pub(super) fn tell(&self, visit: Visit, client: &str) {
        if let Some(watch) = &self.watch {
            watch(visit, client);
        }
    }

    /// Returns the name by which clients select the export.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the description for users; empty if the export has no description.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Returns the export as a new client sees it.
    pub fn view(&self) -> ExportView {
        let view = ExportView::new(&self.name, &self.disk.info());
        ExportView {
            read_only: view.read_only || self.moving.is_some(),
            ..view
        }
    }

    /// Returns how long a new client waits before it is served.
    pub(super) fn connect_delay(&self) -> Duration {
        self.disk.connect_delay()
    }

    /// Attaches a source to the worker with the fewest connections.
    pub(super) fn attach(self: &Arc<Self>, source: Box<dyn Source>) -> io::Result<Attached> {
        let worker = {
            let mut loads = self.loads.lock();
            let least = (0..loads.len()).min_by_key(|worker| loads[*worker]);
            let worker = least.expect("a disk has a worker");
            loads[worker] += 1;
            worker
        };
        let id = self.workers[worker]
            .attach(source)
            .inspect_err(|_| self.loads.lock()[worker] -= 1)?;
        Ok(Attached {
            export: self.clone(),
            worker,
            id,
        })
    }
}

/// A connection that is attached to a worker.
pub(super) struct Attached {
    export: Arc<Export>,
    pub worker: usize,
    id: SourceId,
}

impl Attached {
    /// Detaches the source. Returns when nothing of it is in flight.
    pub fn detach(self) -> Box<dyn Source> {
        let source = self.export.workers[self.worker].detach(self.id);
        self.export.loads.lock()[self.worker] -= 1;
        source
    }
}

/// Keeps a disk activated for one connection; the disk is deactivated on drop.
pub struct InUse(Arc<Export>);

impl InUse {
    /// Activates the disk. The error is a sentence for the client and for the log.
    pub fn new(export: &Arc<Export>) -> Result<InUse, String> {
        export.disk.activate().map_err(|error| error.to_string())?;
        Ok(InUse(export.clone()))
    }

    pub fn export(&self) -> &Arc<Export> {
        &self.0
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Err(error) = self.0.disk.deactivate() {
            tracing::error!("nbd: {error}");
        }
    }
}

/// All exports of a server; exports can be added and removed.
#[derive(Default)]
pub struct Exports(Mutex<Vec<Arc<Export>>>);

/// Error for a duplicate export name.
#[derive(Debug, thiserror::Error)]
#[error("two exports are named '{0}'; rename one of them")]
pub struct SameName(pub String);

impl Exports {
    /// Creates a list of exports.
    ///
    /// # Errors
    /// If two exports have the same name.
    pub fn new(list: Vec<Export>) -> Result<Exports, SameName> {
        let exports = Exports::default();
        list.into_iter()
            .try_for_each(|export| exports.add(export))?;
        Ok(exports)
    }

    /// Adds an export for clients that connect from now on.
    pub fn add(&self, export: Export) -> Result<(), SameName> {
        let mut list = self.0.lock();
        match list.iter().any(|other| other.name == export.name) {
            true => Err(SameName(export.name)),
            false => {
                list.push(Arc::new(export));
                Ok(())
            }
        }
    }

    /// Replaces the export with the same name, if there is one.
    pub(super) fn replace(&self, export: Export) {
        let mut list = self.0.lock();
        let same = list.iter_mut().find(|other| other.name == export.name);
        if let Some(same) = same {
            *same = Arc::new(export);
        }
    }

    /// Returns the export with exactly this name.
    pub(super) fn named(&self, name: &str) -> Option<Arc<Export>> {
        let list = self.0.lock();
        list.iter().find(|export| export.name == name).cloned()
    }

    /// Removes an export. Clients that use it stay connected.
    pub fn remove(&self, name: &str) -> Option<Arc<Export>> {
        let mut list = self.0.lock();
        let index = list.iter().position(|export| export.name == name)?;
        Some(list.remove(index))
    }

    /// Returns all exports in the order in which they were added.
    pub fn all(&self) -> Vec<Arc<Export>> {
        self.0.lock().clone()
    }

    /// Returns true if this export, not just one with its name, is still in the list.
    pub fn has(&self, export: &Arc<Export>) -> bool {
        self.0.lock().iter().any(|other| Arc::ptr_eq(other, export))
    }

    /// Returns the export that a client means. The empty name means the export without a name, or
    /// else the first one.
    pub fn find(&self, name: &str) -> Option<Arc<Export>> {
        let list = self.0.lock();
        let named = list.iter().find(|export| export.name == name);
        let first = || list.first().filter(|_| name.is_empty());
        named.or_else(first).cloned()
    }
}
