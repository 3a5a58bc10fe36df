//! Names of internal snapshots in commands.

use crate::qcow2::snapshot::Snapshot;
use crate::{Error, Result};

/// Selects an internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotName {
    /// The snapshot with this ID, or else the first one with this name.
    IdOrName(String),
    /// The snapshot with this ID and this name. `None` matches any.
    Exact {
        /// ID of the snapshot.
        id: Option<String>,
        /// Name of the snapshot.
        name: Option<String>,
    },
}

impl SnapshotName {
    /// Parses the syntax of `qemu-img convert -l`: `snapshot.id=ID,snapshot.name=NAME`, or just an
    /// ID or a name.
    pub fn parse(text: &str) -> SnapshotName {
        let (mut id, mut name) = (None, None);
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("snapshot.id", value)) => id = Some(value.to_owned()),
                Some(("snapshot.name", value)) => name = Some(value.to_owned()),
                _ => return SnapshotName::IdOrName(text.to_owned()),
            }
        }
        SnapshotName::Exact { id, name }
    }

    /// Finds the snapshot among an image's snapshots.
    pub fn find<'a>(&self, snapshots: &'a [Snapshot]) -> Result<&'a Snapshot> {
        let by = |id: Option<&str>, name: Option<&str>| {
            snapshots.iter().find(|snapshot| {
                id.is_none_or(|id| snapshot.id == id.as_bytes())
                    && name.is_none_or(|name| snapshot.name == name.as_bytes())
            })
        };
        let (found, shown) = match self {
            SnapshotName::IdOrName(text) => {
                let found = by(Some(text), None).or_else(|| by(None, Some(text)));
                (found, text.clone())
            }
            SnapshotName::Exact { id, name } => {
                let both = [id, name].map(|part| part.as_deref().unwrap_or("any"));
                let shown = format!("{} ({})", both[0], both[1]);
                (by(id.as_deref(), name.as_deref()), shown)
            }
        };
        found.ok_or_else(|| {
            Error::usage(format!(
                "no snapshot '{shown}'; 'fathom img snapshot -l' lists the image's snapshots"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(id: &str, name: &str) -> Snapshot {
        Snapshot {
            l1_offset: crate::HostOffset(0),
            l1_entries: 0,
            id: id.into(),
            name: name.into(),
            date: (0, 0),
            vm_clock: 0,
            vm_state_size_32: 0,
            extra: Vec::new(),
        }
    }

    #[test]
    fn ids_go_before_names() {
        let all = [snapshot("1", "2"), snapshot("2", "x"), snapshot("3", "x")];
        let id_of = |text: &str| {
            let found = SnapshotName::parse(text).find(&all);
            found.map(|s| String::from_utf8(s.id.clone()).unwrap())
        };
        assert_eq!(id_of("2").unwrap(), "2");
        assert_eq!(id_of("x").unwrap(), "2");
        assert_eq!(id_of("snapshot.name=2").unwrap(), "1");
        assert_eq!(id_of("snapshot.id=3,snapshot.name=x").unwrap(), "3");
        assert!(id_of("snapshot.id=1,snapshot.name=x").is_err());
        assert!(id_of("y").is_err());
    }
}
