//! A disk in use, as the API of its server shows and changes it.

use crate::target::Disk;
use anyhow::Context;
use fathom_client::ClientError;
use fathom_control::Owner;
use fathom_metrics::Info;
use fathom_spec::DiskSpec;
use fathom_trace::{SlowRequest, Summary};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Timeout of a change: the server waits some seconds for requests in flight and for storage.
const CHANGE: Duration = Duration::from_secs(60);

/// A disk in use.
pub struct LiveDisk {
    disk: Disk,
}

/// A disk at a moment.
#[derive(Deserialize)]
pub struct Seen {
    /// Options with which the disk is served.
    pub options: DiskSpec,
    /// Owner of the disk's name; absent from older servers.
    #[serde(default)]
    pub owner: Option<Owner>,
    pub state: Info,
}

/// How long a change lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lasting {
    /// Until the server restarts.
    Transient,
    /// Also after a restart, if the disk is persistent.
    Persistent,
}

impl LiveDisk {
    pub fn new(disk: Disk) -> LiveDisk {
        LiveDisk { disk }
    }

    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    pub fn name(&self) -> &str {
        &self.disk.name
    }

    /// Returns the disk's present options and state.
    pub fn seen(&self) -> anyhow::Result<Seen> {
        let shown: Value = self.disk.server.get(&self.disk.place()).send()?;
        self.understand(shown)
    }

    /// Returns the times of all requests until now.
    pub fn summary(&self) -> Result<Summary, ClientError> {
        self.disk.server.get(&self.disk.below("stats")).send()
    }

    /// Returns the slowest recent requests.
    pub fn slow(&self) -> Result<Vec<SlowRequest>, ClientError> {
        #[derive(Deserialize)]
        struct Answer {
            requests: Vec<SlowRequest>,
        }
        let answer: Answer = self.disk.server.get(&self.disk.below("slow")).send()?;
        Ok(answer.requests)
    }

    /// Gives the disk these options. `key`: the option that changes.
    ///
    /// Returns the disk afterwards. If the server rejects the change, the disk keeps its options.
    pub fn change(&self, options: &DiskSpec, key: &str, lasting: Lasting) -> anyhow::Result<Seen> {
        let put = self.disk.server.put(&self.disk.place());
        let put = put.header("if-match", "*").json(&table(options, key)?);
        let put = put.flag("temporary", lasting == Lasting::Transient);
        let changed = put.within(CHANGE).send()?;
        self.understand(changed)
    }

    fn understand(&self, shown: Value) -> anyhow::Result<Seen> {
        Seen::deserialize(shown).with_context(|| {
            format!(
                "disk '{}': this program does not know all options of the disk; use the program of \
                 the server's version",
                self.disk.name
            )
        })
    }
}

/// Returns the options as a request has them. The option `key` is explicit, even at its default:
/// the server keeps options of a static disk that a request does not name.
fn table(options: &DiskSpec, key: &str) -> anyhow::Result<Map<String, Value>> {
    let Value::Object(mut table) = serde_json::to_value(options)? else {
        anyhow::bail!("the options of the disk are not an object");
    };
    let default = match key {
        "filters" => json!([]),
        _ => Value::Null,
    };
    table.entry(key).or_insert(default);
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_storage::Location;

    #[test]
    fn an_option_at_its_default_is_sent() {
        let spec = DiskSpec::new("a".into(), Location::file("/a"));
        for (key, default) in [("poll", Value::Null), ("filters", json!([]))] {
            let table = table(&spec, key).unwrap();
            assert_eq!(table[key], default);
            DiskSpec::deserialize(Value::Object(table)).unwrap();
        }
    }
}
