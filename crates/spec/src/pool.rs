//! Threads that disks share, as configurations have them.

use crate::name::check_name;
use crate::text;
use fathom_core::Polling;
use fathom_stack::{CpuList, PoolOptions};
use fathom_storage::EngineKind;
use serde::{Deserialize, Serialize};

/// Threads that disks share, as they are written.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PoolSpec {
    threads: Option<u16>,
    #[serde(default, with = "text::optional")]
    cpus: Option<CpuList>,
    #[serde(default, with = "text::optional")]
    poll: Option<Polling>,
    #[serde(default, with = "text::optional")]
    aio: Option<EngineKind>,
}

impl PoolSpec {
    /// The error is one line for the user.
    pub fn into_options(self, name: &str) -> Result<PoolOptions, String> {
        check_name(name).map_err(|_| {
            "not a pool's name, which has 1 to 64 letters, digits, -, _ and ., not beginning \
             with a dot"
                .to_owned()
        })?;
        if self.threads.is_some_and(|n| !(1..=256).contains(&n)) {
            return Err("threads: not a number from 1 to 256".into());
        }
        let new = PoolOptions::new(name.to_owned());
        Ok(PoolOptions {
            threads: self.threads.map_or(new.threads, usize::from),
            cpus: self.cpus.unwrap_or_default(),
            polling: self.poll.unwrap_or(new.polling),
            engine: self.aio.unwrap_or(new.engine),
            ..new
        })
    }

    /// Returns the table of the configuration that has these options.
    pub fn of(options: &PoolOptions) -> PoolSpec {
        PoolSpec {
            threads: u16::try_from(options.threads).ok(),
            cpus: (options.cpus != CpuList::default()).then(|| options.cpus.clone()),
            poll: Some(options.polling),
            aio: Some(options.engine),
        }
    }
}
