//! What clients may choose from.

use super::connection::ExportView;
use super::moving::Moving;
use crate::watch::{Visit, Watch};
use fathom_core::{Disk, Source, SourceId, WorkerHandle};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// A disk under a name.
pub struct Export {
    name: String,
    description: String,
    disk: Arc<dyn Disk>,
    workers: Arc<[WorkerHandle]>,
    /// Another server may take the disk over. Clients only read then.
    moving: Option<Arc<Moving>>,
    watch: Option<Watch>,
    /// What its block status tells as dirty.
    bitmap: Option<String>,
    /// Connections of each worker.
    loads: Mutex<Box<[usize]>>,
}

impl Export {
    /// Export `disk`, whose workers are `workers` and whose requests may begin
    /// and end anywhere (the storages' `ByteDisk`). Name and description have
    /// at most 4096 bytes each and no NUL.
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

    /// One that another server may take over.
    pub fn movable(self, moving: Arc<Moving>) -> Export {
        Export {
            moving: Some(moving),
            ..self
        }
    }

    pub(super) fn moving(&self) -> Option<&Arc<Moving>> {
        self.moving.as_ref()
    }

    /// One whose disk knows what has been changed since the bitmap of that name was begun.
    pub fn with_bitmap(self, name: String) -> Export {
        Export {
            bitmap: Some(name),
            ..self
        }
    }

    pub(super) fn bitmap(&self) -> Option<&str> {
        self.bitmap.as_deref()
    }

    /// With somebody who hears of its clients.
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

    pub fn name(&self) -> &str {
        &self.name
    }

    /// For people; empty: there is none.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// As a client that comes now sees it.
    pub fn view(&self) -> ExportView {
        let view = ExportView::new(&self.name, &self.disk.info());
        ExportView {
            read_only: view.read_only || self.moving.is_some(),
            ..view
        }
    }

    /// How long a client waits before it is served.
    pub(super) fn connect_delay(&self) -> Duration {
        self.disk.connect_delay()
    }

    fn loads(&self) -> MutexGuard<'_, Box<[usize]>> {
        self.loads.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Attach to the worker with the fewest connections.
    pub(super) fn attach(self: &Arc<Self>, source: Box<dyn Source>) -> io::Result<Attached> {
        let worker = {
            let mut loads = self.loads();
            let least = (0..loads.len()).min_by_key(|worker| loads[*worker]);
            let worker = least.expect("a disk has a worker");
            loads[worker] += 1;
            worker
        };
        let id = self.workers[worker]
            .attach(source)
            .inspect_err(|_| self.loads()[worker] -= 1)?;
        Ok(Attached {
            export: self.clone(),
            worker,
            id,
        })
    }
}

/// A connection at its worker.
pub(super) struct Attached {
    export: Arc<Export>,
    pub worker: usize,
    id: SourceId,
}

impl Attached {
    /// Stop serving it; returns when nothing of it is in flight.
    pub fn detach(self) -> Box<dyn Source> {
        let source = self.export.workers[self.worker].detach(self.id);
        self.export.loads()[self.worker] -= 1;
        source
    }
}

/// A disk that is activated for one connection; no longer when dropped.
pub struct InUse(Arc<Export>);

impl InUse {
    /// The error is a sentence for the client and for the log.
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

/// All exports of a server; they come and go.
#[derive(Default)]
pub struct Exports(Mutex<Vec<Arc<Export>>>);

/// Names must tell exports apart.
#[derive(Debug, thiserror::Error)]
#[error("two exports are named '{0}'; rename one of them")]
pub struct SameName(pub String);

impl Exports {
    pub fn new(list: Vec<Export>) -> Result<Exports, SameName> {
        let exports = Exports::default();
        list.into_iter()
            .try_for_each(|export| exports.add(export))?;
        Ok(exports)
    }

    /// One more, for clients that come from now on.
    pub fn add(&self, export: Export) -> Result<(), SameName> {
        let mut list = self.list();
        match list.iter().any(|other| other.name == export.name) {
            true => Err(SameName(export.name)),
            false => {
                list.push(Arc::new(export));
                Ok(())
            }
        }
    }

    /// Put it in the place of the one that has its name.
    pub(super) fn replace(&self, export: Export) {
        let mut list = self.list();
        let same = list.iter_mut().find(|other| other.name == export.name);
        if let Some(same) = same {
            *same = Arc::new(export);
        }
    }

    /// The one that has this very name.
    pub(super) fn named(&self, name: &str) -> Option<Arc<Export>> {
        let list = self.list();
        list.iter().find(|export| export.name == name).cloned()
    }

    /// Take the one of that name out. Clients that it has keep it.
    pub fn remove(&self, name: &str) -> Option<Arc<Export>> {
        let mut list = self.list();
        let index = list.iter().position(|export| export.name == name)?;
        Some(list.remove(index))
    }

    /// In the order in which they came.
    pub fn all(&self) -> Vec<Arc<Export>> {
        self.list().clone()
    }

    /// Whether this very one is still there.
    pub fn has(&self, export: &Arc<Export>) -> bool {
        self.list().iter().any(|other| Arc::ptr_eq(other, export))
    }

    /// The one that a client means. Without a name it is the one that has
    /// none, or else the first.
    pub fn find(&self, name: &str) -> Option<Arc<Export>> {
        let list = self.list();
        let named = list.iter().find(|export| export.name == name);
        let first = || list.first().filter(|_| name.is_empty());
        named.or_else(first).cloned()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Arc<Export>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}
