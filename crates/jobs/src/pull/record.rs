//! The persistent state of a move: a file, by default next to the image.

use super::terms::Terms;
use fathom_files::gate;
use fathom_files::lasting::{self, Sameness, UNKNOWN, lasting_id_at};
use fathom_units::cause;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Length in bytes of the header, which is written at once; the map follows it.
const LEN: usize = 4096;
/// Bytes per word of the map, little-endian.
const WORD: usize = 8;

/// The header of the record. The move has come at least as far as it says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    /// The identifier of this move.
    id: String,
    source: String,
    /// The image's identity (`fathom_files::lasting`). `None`: the image is not a file.
    image: Option<String>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Stage {
    Copying,
    /// The disk has been taken over, and its guest may have changed the present blocks.
    ///
    /// The map after the header says which blocks are present.
    Arriving,
    /// All data is here.
    Taken,
    /// All data was here, then another server took the disk over.
    Gone,
}

#[derive(Debug)]
pub(super) struct Record {
    file: File,
    state: State,
    /// Whether a write has failed, so that the contents of the file are unknown.
    is_uncertain: bool,
}

impl Record {
    /// Opens the record of this move, or creates one with `new_id`.
    ///
    /// # Errors
    /// A message for the user: the record belongs to another move, or cannot be used.
    pub(super) fn open(terms: &Terms, new_id: &str) -> Result<Record, String> {
        let shown = terms.record.display();
        let failed = |error: io::Error| format!("{shown}: {}", cause(error));
        let image = terms.image.as_deref().map(identity).transpose();
        let new = State {
            id: new_id.to_owned(),
            source: terms.source.as_str().to_owned(),
            image: image.map_err(failed)?,
            stage: Stage::Copying,
        };
        let file = gate::record(&terms.record).map_err(failed)?;
        let found = read(&file).map_err(failed)?;
        let state = match found {
            Found::Nothing => new,
            Found::State(state) => state.or(new).map_err(|why| format!("{shown}: {why}"))?,
            Found::Other => return Err(format!("{shown}: not a record of a disk's move")),
        };
        let mut record = Record {
            file,
            state,
            is_uncertain: true,
        };
        record.make_certain().map_err(failed)?;
        Ok(record)
    }

    pub(super) fn id(&self) -> &str {
        &self.state.id
    }

    /// Returns whether all data is here and the disk has stayed here since.
    pub(super) fn is_taken(&self) -> bool {
        self.state.stage == Stage::Taken
    }

    /// Returns whether the guest has run here while data was missing.
    pub(super) fn is_arriving(&self) -> bool {
        self.state.stage == Stage::Arriving
    }

    /// Records durably that the guest may run here and that no block is present yet.
    ///
    /// `words` is the length of the map.
    pub(super) fn begin_arriving(&mut self, words: usize) -> io::Result<()> {
        // Clears the old map, which must not be mistaken for the new one.
        self.file.set_len(LEN as u64)?;
        self.file.set_len((LEN + words * WORD) as u64)?;
        self.file.sync_all()?;
        self.set(Stage::Arriving)
    }

    /// Reads the map of present blocks, which must have `words` words.
    pub(super) fn noted(&self, words: usize) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0; words * WORD];
        if self.file.metadata()?.len() != (LEN + bytes.len()) as u64 {
            return Err(io::Error::other(
                "the record belongs to a disk of another size",
            ));
        }
        self.file.read_exact_at(&mut bytes, LEN as u64)?;
        let (words, _) = bytes.as_chunks::<WORD>();
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// Writes these words of the map, durably.
    pub(super) fn note(&self, words: &[(usize, u64)]) -> io::Result<()> {
        for (n, word) in words {
            let at = (LEN + n * WORD) as u64;
            self.file.write_all_at(&word.to_le_bytes(), at)?;
        }
        self.file.sync_data()
    }

    /// Records durably that all data is here.
    pub(super) fn set_taken(&mut self) -> io::Result<()> {
        self.set(Stage::Taken)
    }

    /// Records durably that another server has taken the disk over.
    pub(super) fn set_gone(&mut self) -> io::Result<()> {
        self.set(Stage::Gone)
    }

    /// Writes the state again if the contents of the file are unknown.
    pub(super) fn make_certain(&mut self) -> io::Result<()> {
        if self.is_uncertain {
            self.write()?;
            self.is_uncertain = false;
        }
        Ok(())
    }

    fn set(&mut self, stage: Stage) -> io::Result<()> {
        let before = std::mem::replace(&mut self.state.stage, stage);
        self.write().inspect_err(|_| {
            self.state.stage = before;
            self.is_uncertain = true;
        })
    }

    fn write(&self) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(&self.state)?;
        if bytes.len() >= LEN {
            return Err(io::Error::other("the source's name is too long"));
        }
        bytes.resize(LEN - 1, b' ');
        bytes.push(b'\n');
        self.file.write_all_at(&bytes, 0)?;
        self.file.sync_all()
    }
}

impl State {
    /// Returns the state with which the move `new` continues. The error says what to do.
    fn or(self, new: State) -> Result<State, String> {
        let image = match (&self.image, &new.image) {
            (Some(then), Some(now)) => lasting::compare(then, now),
            (None, None) => Sameness::Same,
            _ => Sameness::Different,
        };
        let is_same = image == Sameness::Same && self.source == new.source;
        match self.stage {
            Stage::Copying if is_same => Ok(self),
            // No data is lost: the disk is copied again from the start.
            Stage::Copying => Ok(new),
            Stage::Arriving if is_same => Ok(self),
            Stage::Arriving if image == Sameness::Unknown => Err(
                "a guest has run on an incomplete image, and nothing proves that it is this \
                 image, because its device or file system has no identities. If it is another \
                 image, remove the record; otherwise copy the disk anew, into a file"
                    .into(),
            ),
            Stage::Arriving if image == Sameness::Different => Err(
                "a guest has run on another image of this name, which is incomplete; remove the \
                 record to copy this image"
                    .into(),
            ),
            Stage::Arriving => Err(format!(
                "the disk is being copied from {}, and its guest has run here; copy it from there",
                self.source
            )),
            Stage::Taken if is_same => Ok(self),
            Stage::Taken if image == Sameness::Unknown => Err(
                "the disk was copied completely, and nothing proves that this is that image, \
                 because its device or file system has no identities. If it is, serve it without \
                 --pull; otherwise remove the record"
                    .into(),
            ),
            Stage::Taken if image == Sameness::Different => Err(
                "another image of this name was copied completely; remove the record to copy \
                 this image"
                    .into(),
            ),
            Stage::Taken => Err(format!(
                "the disk was copied from {}; remove the record to copy it from elsewhere",
                self.source
            )),
            Stage::Gone if image == Sameness::Different => Ok(new),
            Stage::Gone if image == Sameness::Unknown => Err(
                "the disk has moved to another server, and nothing proves that this is another \
                 image than the old one; remove the record if it is"
                    .into(),
            ),
            Stage::Gone => Err(
                "the disk has moved to another server since, so this image is old; create a new \
                 one"
                .into(),
            ),
        }
    }
}

/// Returns whether the disk must not be served by itself, according to the record at `path`.
///
/// The disk must not be served if a guest has run on it and some data is missing. A record that
/// cannot be read or parsed counts as unfinished.
pub fn is_unfinished(path: &Path) -> bool {
    let mut options = File::options();
    // The owner of the directory may have put any kind of file there.
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY);
    let file = options.read(true).open(path);
    let found = file.and_then(|file| match file.metadata()?.is_file() {
        true => read(&file),
        false => Ok(Found::Other),
    });
    match found {
        Ok(Found::State(state)) => state.stage == Stage::Arriving,
        Ok(Found::Nothing) => false,
        Ok(Found::Other) => true,
        Err(error) => !matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
        ),
    }
}

enum Found {
    Nothing,
    State(State),
    Other,
}

fn read(file: &File) -> io::Result<Found> {
    let len = file.metadata()?.len();
    let mut bytes = vec![0; len.min(LEN as u64) as usize];
    file.read_exact_at(&mut bytes, 0)?;
    // A record that was created but not written before a crash counts as none.
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(Found::Nothing);
    }
    let state = serde_json::from_slice(&bytes).ok();
    let state = state.filter(|state: &State| fathom_nbd::protocol::is_move_id(&state.id));
    Ok(state.map_or(Found::Other, Found::State))
}

/// Returns the image's identity, which survives a restart of the host.
fn identity(image: &Path) -> io::Result<String> {
    let id = lasting_id_at(image)?;
    // `UNKNOWN` matches no image.
    Ok(id.unwrap_or_else(|| UNKNOWN.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Place {
            let place = Place(tempfile::tempdir().unwrap());
            place.make_image();
            place
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        /// Replaces the image with a new file.
        fn make_image(&self) {
            fs::write(self.path("new"), [0; 512]).unwrap();
            fs::rename(self.path("new"), self.path("image")).unwrap();
        }

        fn open(&self, source: &str, id: &str) -> Result<Record, String> {
            let terms = Terms {
                source: format!("nbd://{source}/x").parse().unwrap(),
                image: Some(self.path("image")),
                record: self.path("record"),
                rate: None,
                post_copy: false,
            };
            Record::open(&terms, id)
        }
    }

    #[test]
    fn what_was_noted_is_known_again() {
        let place = Place::new();
        assert_eq!(place.open("a", "first").unwrap().id(), "first");
        assert_eq!(place.open("a", "second").unwrap().id(), "first");
        // A record of another move is replaced.
        assert_eq!(place.open("b", "third").unwrap().id(), "third");
        let mut record = place.open("b", "fourth").unwrap();
        assert!(!record.is_taken());
        record.set_taken().unwrap();
        let record = place.open("b", "fifth").unwrap();
        assert!(record.is_taken() && record.id() == "third");
    }

    #[test]
    fn nothing_is_served_that_is_old() {
        let place = Place::new();
        place.open("a", "first").unwrap().set_taken().unwrap();
        let error = place.open("b", "second").unwrap_err();
        assert!(error.contains("was copied from nbd://a/x"), "{error}");
        place.open("a", "second").unwrap().set_gone().unwrap();
        for source in ["a", "b"] {
            let error = place.open(source, "third").unwrap_err();
            assert!(error.contains("has moved to another server"), "{error}");
        }
        place.make_image();
        assert!(!place.open("a", "fourth").unwrap().is_taken());
        place.open("a", "fifth").unwrap().set_taken().unwrap();
        place.make_image();
        let error = place.open("a", "sixth").unwrap_err();
        assert!(error.contains("another image"), "{error}");
    }

    #[test]
    fn what_is_here_of_a_disk_that_arrives_is_known_again() {
        let place = Place::new();
        let mut record = place.open("a", "first").unwrap();
        record.begin_arriving(3).unwrap();
        assert_eq!(record.noted(3).unwrap(), [0, 0, 0]);
        record.note(&[(1, 5), (2, u64::MAX)]).unwrap();
        drop(record);
        assert!(is_unfinished(&place.path("record")));
        let mut record = place.open("a", "second").unwrap();
        assert!(record.is_arriving() && !record.is_taken() && record.id() == "first");
        assert_eq!(record.noted(3).unwrap(), [0, 5, u64::MAX]);
        assert!(record.noted(4).is_err());
        // The move resumes neither from another source nor into another image.
        let error = place.open("b", "third").unwrap_err();
        assert!(error.contains("its guest has run here"), "{error}");
        record.set_taken().unwrap();
        assert!(place.open("a", "fourth").unwrap().is_taken());
        assert!(!is_unfinished(&place.path("record")));
        // A second move starts with an empty map.
        record.begin_arriving(3).unwrap();
        assert_eq!(record.noted(3).unwrap(), [0, 0, 0]);
        place.make_image();
        let error = place.open("a", "fifth").unwrap_err();
        assert!(error.contains("another image"), "{error}");
        assert!(is_unfinished(&place.path("record")));
        assert!(!is_unfinished(&place.path("nothing")));
    }

    /// Covers devices without an identity, and records of earlier versions.
    #[test]
    fn image_that_nothing_proves_is_refused() {
        let place = Place::new();
        let forget_image = || {
            let path = place.path("record");
            let mut bytes = fs::read(&path).unwrap();
            let mut state: State = serde_json::from_slice(&bytes[..LEN]).unwrap();
            state.image = Some(UNKNOWN.into());
            let mut text = serde_json::to_vec(&state).unwrap();
            text.resize(LEN, b' ');
            bytes[..LEN].copy_from_slice(&text);
            fs::write(&path, bytes).unwrap();
        };
        // In stage `Copying` the disk is copied again from the start.
        place.open("a", "first").unwrap();
        forget_image();
        let mut record = place.open("a", "second").unwrap();
        assert_eq!(record.id(), "second");
        for stage in [Stage::Arriving, Stage::Taken, Stage::Gone] {
            match stage {
                Stage::Arriving => record.begin_arriving(3).unwrap(),
                stage => record.set(stage).unwrap(),
            }
            forget_image();
            for source in ["a", "b"] {
                let error = place.open(source, "third").unwrap_err();
                assert!(error.contains("nothing proves"), "{stage:?}: {error}");
            }
            assert_eq!(
                is_unfinished(&place.path("record")),
                stage == Stage::Arriving
            );
        }
    }

    #[test]
    fn record_that_cannot_be_understood_is_unfinished() {
        let place = Place::new();
        let path = place.path("record");
        assert!(!is_unfinished(&path), "there is none");
        let of_later = br#"{"id":"x","source":"","image":null,"stage":"paused"}"#;
        for bytes in [&b"hello"[..], &[1; 8192], of_later] {
            fs::write(&path, bytes).unwrap();
            assert!(is_unfinished(&path));
        }
        place.open("a", "id").unwrap_err();
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(is_unfinished(&path), "a directory");
        fs::remove_dir(&path).unwrap();
        std::os::unix::fs::symlink(place.path("elsewhere"), &path).unwrap();
        assert!(is_unfinished(&path), "a link");
        fs::remove_file(&path).unwrap();
        // An empty file was created but never written.
        fs::write(&path, "").unwrap();
        assert!(!is_unfinished(&path));
    }

    #[test]
    fn another_file_is_not_taken_for_a_record() {
        let place = Place::new();
        let path = place.path("record");
        let no_id = br#"{"id":"","source":"","image":null,"stage":"taken"}"#;
        for bytes in [&b"hello"[..], &[1; 8192], no_id] {
            fs::write(&path, bytes).unwrap();
            let error = place.open("a", "id").unwrap_err();
            assert!(error.contains("not a record"), "{error}");
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        // These files were created but never written.
        for bytes in [&b""[..], &[0; 4096]] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(place.open("a", "id").unwrap().id(), "id");
        }
    }
}
