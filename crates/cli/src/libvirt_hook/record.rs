//! The names of the disks that the hook has added for a domain, in a file that a reboot deletes.

use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Directory of the files. Only root can write to it.
const DIR: &str = "/run/fathom-libvirt";

/// The content of the file.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Content {
    disks: BTreeSet<String>,
    #[serde(default)]
    incoming: bool,
}

/// The file of a domain. The file names a disk from before the disk is added until after its
/// removal.
#[derive(Debug)]
pub struct Record {
    path: PathBuf,
    disks: BTreeSet<String>,
    /// Whether the domain arrives by a migration.
    pub is_incoming: bool,
}

impl Record {
    /// Reads the file of the domain with this UUID, if there is one.
    pub fn load(uuid: &str) -> anyhow::Result<Record> {
        let path = Path::new(DIR).join(format!("{uuid}.json"));
        let content = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Content::default(),
            read => {
                let read = read.with_context(|| path.display().to_string())?;
                serde_json::from_slice(&read).with_context(|| path.display().to_string())?
            }
        };
        Ok(Record {
            path,
            disks: content.disks,
            is_incoming: content.incoming,
        })
    }

    pub fn contains(&self, name: &str) -> bool {
        self.disks.contains(name)
    }

    pub fn names(&self) -> Vec<String> {
        self.disks.iter().cloned().collect()
    }

    pub fn insert(&mut self, name: &str) -> anyhow::Result<()> {
        self.disks.insert(name.to_owned());
        self.save()
    }

    pub fn remove(&mut self, name: &str) -> anyhow::Result<()> {
        self.disks.remove(name);
        self.save()
    }

    /// Removes the file.
    pub fn end(self) -> anyhow::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| self.path.display().to_string())
            }
            _ => Ok(()),
        }
    }

    fn save(&self) -> anyhow::Result<()> {
        let content = Content {
            disks: self.disks.clone(),
            incoming: self.is_incoming,
        };
        write(&self.path, &content).with_context(|| self.path.display().to_string())
    }
}

/// Replaces the file atomically, so that a killed hook leaves the old content or the new one.
fn write(path: &Path, content: &Content) -> anyhow::Result<()> {
    fs::create_dir_all(DIR)?;
    let mut file = tempfile::NamedTempFile::new_in(DIR)?;
    file.write_all(&serde_json::to_vec(content)?)?;
    file.persist(path)?;
    Ok(())
}
