//! What is known after a restart: a file beside the image.

use fathom_files::gate;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// All of the file: written at once, a disk's smallest block.
const LEN: usize = 512;

/// How far the move was at least.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    /// What this server calls itself.
    id: String,
    taken: bool,
}

#[derive(Debug)]
pub(super) struct Record {
    file: File,
    state: State,
}

impl Record {
    /// The record of that name, which begins with `new_id` if there is none. The error is for the user.
    pub(super) fn open(path: &Path, new_id: &str) -> Result<Record, String> {
        let shown = path.display();
        let failed = |error: io::Error| format!("{shown}: {error}");
        let file = gate::record(path).map_err(failed)?;
        let mut bytes = Vec::new();
        let len = file.metadata().map_err(failed)?.len();
        if len > LEN as u64 {
            return Err(format!("{shown}: is no record of a disk's move"));
        }
        bytes.resize(len as usize, 0);
        file.read_exact_at(&mut bytes, 0).map_err(failed)?;
        // One that was made and not written, at a crash, is as good as none.
        if bytes.iter().all(|byte| *byte == 0) {
            let state = State {
                id: new_id.to_owned(),
                taken: false,
            };
            let record = Record { file, state };
            record.write().map_err(failed)?;
            return Ok(record);
        }
        let state: State = serde_json::from_slice(&bytes)
            .map_err(|_| format!("{shown}: is no record of a disk's move"))?;
        match fathom_nbd::protocol::is_move_id(&state.id) {
            true => Ok(Record { file, state }),
            false => Err(format!("{shown}: is no record of a disk's move")),
        }
    }

    pub(super) fn id(&self) -> &str {
        &self.state.id
    }

    /// All of the disk is here, and has been since.
    pub(super) fn is_taken(&self) -> bool {
        self.state.taken
    }

    /// All of the disk is here, durably.
    pub(super) fn set_taken(&mut self) -> io::Result<()> {
        self.state.taken = true;
        self.write().inspect_err(|_| self.state.taken = false)
    }

    fn write(&self) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(&self.state)?;
        bytes.resize(LEN - 1, b' ');
        bytes.push(b'\n');
        self.file.write_all_at(&bytes, 0)?;
        self.file.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_known_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let record = |id: &str| Record::open(&path, id).unwrap();
        assert_eq!(record("first").id(), "first");
        assert!(!record("second").is_taken());
        let mut known = record("second");
        assert_eq!(known.id(), "first");
        known.set_taken().unwrap();
        assert!(record("third").is_taken());
        assert_eq!(record("third").id(), "first");
    }

    #[test]
    fn another_file_is_not_taken_for_a_record() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        for bytes in [&b"hello"[..], &[1; 4096], br#"{"id":"","taken":true}"#] {
            std::fs::write(&path, bytes).unwrap();
            let error = Record::open(&path, "id").unwrap_err();
            assert!(error.contains("is no record"), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
        // Made, and not written.
        for bytes in [&b""[..], &[0; 512]] {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(Record::open(&path, "id").unwrap().id(), "id");
        }
    }
}
