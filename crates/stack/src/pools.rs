//! Named pools of threads that disks share.

use crate::cpus::CpuList;
use fathom_core::{DiskError, Polling, Pool, WorkerOptions};
use fathom_storage::{EngineKind, Users};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Options of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// The name by which disks refer to the pool.
    pub name: String,
    /// Number of threads, at least 1.
    pub threads: usize,
    /// The CPUs for the threads, divided among them; empty: any CPU.
    pub cpus: CpuList,
    /// How long idle threads poll before they sleep.
    pub polling: Polling,
    /// The engine, which serves all disks of the pool.
    pub engine: EngineKind,
}

impl PoolOptions {
    /// Returns the default options.
    pub fn new(name: String) -> PoolOptions {
        PoolOptions {
            name,
            threads: 2,
            cpus: CpuList::default(),
            polling: Polling::default(),
            engine: EngineKind::default(),
        }
    }
}

/// A running pool.
pub(crate) struct NamedPool {
    pub(crate) options: PoolOptions,
    pub(crate) pool: Pool,
    /// The name of the engine in use, after a fallback if one was needed.
    pub(crate) engine: &'static str,
}

/// All pools. Each pool runs while this value or one of its disks exists.
#[derive(Default)]
pub struct Pools(Vec<Arc<NamedPool>>);

impl Pools {
    /// Starts the pools, whose names must differ.
    pub fn start(all: Vec<PoolOptions>) -> Result<Pools, String> {
        let started = all.into_iter().map(|options| {
            let name = options.name.clone();
            let pool = options.cpus.check().and_then(|()| {
                let started = NamedPool::start(options);
                started.map_err(|error| error.to_string())
            });
            let pool = pool.map(Arc::new);
            pool.map_err(|error| format!("pool '{name}': {error}"))
        });
        started.collect::<Result<_, _>>().map(Pools)
    }

    /// Checks that a pool of this name exists. The error is a message for the user.
    pub fn check(&self, name: &str) -> Result<(), String> {
        self.find(name).map(drop)
    }

    /// Returns the CPU time of each thread of the pool; empty if the pool does not exist.
    pub fn cpu_times(&self, name: &str) -> Vec<Duration> {
        self.find(name)
            .map_or_else(|_| Vec::new(), |pool| pool.pool.cpu_times())
    }

    pub(crate) fn find(&self, name: &str) -> Result<&Arc<NamedPool>, String> {
        let found = self.0.iter().find(|pool| pool.options.name == name);
        found.ok_or_else(|| {
            let names: Vec<_> = self.0.iter().map(|pool| &*pool.options.name).collect();
            match &names[..] {
                [] => format!("no pool '{name}'; add a table [pool.{name}] to the configuration"),
                _ => format!("no pool '{name}'; pools are {}", names.join(", ")),
            }
        })
    }
}

impl NamedPool {
    fn start(options: PoolOptions) -> Result<NamedPool, DiskError> {
        let threads = (0..options.threads).map(|index| WorkerOptions {
            name: format!("pool {}/{index}", options.name),
            polling: options.polling,
            cpus: options.cpus.share(index, options.threads),
        });
        let name = Arc::<OnceLock<_>>::default();
        let engine = {
            let (kind, name) = (options.engine, name.clone());
            move || {
                let engine = fathom_storage::engine_for(kind, Users::Many)?;
                // All threads use the same engine.
                let _ = name.set(engine.name());
                Ok(engine)
            }
        };
        let pool = Pool::start(threads, engine)?;
        Ok(NamedPool {
            options,
            pool,
            engine: name.get().copied().unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_found_by_name() {
        let none = Pools::default().check("x").unwrap_err();
        assert!(none.contains("[pool.x]"), "{none}");
        let both = ["fast", "slow"].map(|name| PoolOptions::new(name.into()));
        let pools = Pools::start(both.into()).unwrap();
        assert_eq!(pools.check("fast"), Ok(()));
        assert_eq!(pools.find("slow").unwrap().pool.threads(), 2);
        let other = pools.check("x").unwrap_err();
        assert!(other.contains("pools are fast, slow"), "{other}");
    }

    #[test]
    fn a_pool_on_cpus_that_are_not_there_is_refused() {
        let options = PoolOptions {
            cpus: "1023".parse().unwrap(),
            ..PoolOptions::new("far".into())
        };
        let error = Pools::start(vec![options]).err().unwrap();
        assert!(error.contains("pool 'far': "), "{error}");
        assert!(error.contains("1023"), "{error}");
    }
}
