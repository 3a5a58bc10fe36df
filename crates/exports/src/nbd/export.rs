//! What clients may choose from.

use super::connection::ExportView;
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
        ExportView::new(&self.name, &self.disk.info())
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

/// All exports of a server.
pub struct Exports {
    list: Vec<Arc<Export>>,
    /// Which one the empty name means.
    default: usize,
}

/// Names must tell exports apart.
#[derive(Debug, thiserror::Error)]
#[error("two exports have the name '{0}'")]
pub struct SameName(pub String);

impl Exports {
    /// At least one. The first is the default one, unless another has the
    /// empty name.
    pub fn new(list: Vec<Export>) -> Result<Exports, SameName> {
        assert!(!list.is_empty(), "a server has an export");
        for (i, export) in list.iter().enumerate() {
            if list[..i].iter().any(|other| other.name == export.name) {
                return Err(SameName(export.name.clone()));
            }
        }
        let default = list.iter().position(|e| e.name.is_empty()).unwrap_or(0);
        Ok(Exports {
            list: list.into_iter().map(Arc::new).collect(),
            default,
        })
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<Export>> {
        self.list.iter()
    }

    /// The one that a client means.
    pub fn find(&self, name: &str) -> Option<&Arc<Export>> {
        match name {
            "" => self.list.get(self.default),
            name => self.list.iter().find(|export| export.name == name),
        }
    }
}
