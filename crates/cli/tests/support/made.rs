//! Directories whose files are created once and then kept in memory, with their holes.

use parking_lot::Mutex;
use rustix::fs::{SeekFrom, seek};
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::Hash;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// A file's name, length, and data with their offsets.
struct SparseFile {
    name: OsString,
    len: u64,
    data: Vec<(u64, Vec<u8>)>,
}

impl SparseFile {
    fn read(path: &Path) -> SparseFile {
        let file = File::open(path).unwrap();
        let (len, mut data, mut from) = (file.metadata().unwrap().len(), Vec::new(), 0);
        // The seek fails behind the last data.
        while let Ok(begin) = seek(&file, SeekFrom::Data(from)) {
            from = seek(&file, SeekFrom::Hole(begin)).unwrap();
            let mut part = vec![0; (from - begin) as usize];
            file.read_exact_at(&mut part, begin).unwrap();
            data.push((begin, part));
        }
        let name = path.file_name().unwrap().to_owned();
        SparseFile { name, len, data }
    }

    fn write(&self, dir: &Path) {
        let file = File::create(dir.join(&self.name)).unwrap();
        file.set_len(self.len).unwrap();
        for (offset, part) in &self.data {
            file.write_all_at(part, *offset).unwrap();
        }
    }
}

/// All files of a directory.
type Files = Vec<SparseFile>;

/// Files made by an earlier call with the same key.
pub struct Made<K>(Mutex<Option<HashMap<K, Arc<OnceLock<Files>>>>>);

impl<K: Hash + Eq> Made<K> {
    pub const fn new() -> Made<K> {
        Made(Mutex::new(None))
    }

    /// Fills the empty directory `dir`: the first call runs `make`, and later calls copy the files.
    pub fn fill(&self, key: K, dir: &Path, make: impl FnOnce()) {
        let made = self
            .0
            .lock()
            .get_or_insert_default()
            .entry(key)
            .or_default()
            .clone();
        let mut is_first = false;
        let files = made.get_or_init(|| {
            is_first = true;
            make();
            let entries = fs::read_dir(dir)
                .unwrap()
                .map(|entry| entry.unwrap().path());
            entries.map(|path| SparseFile::read(&path)).collect()
        });
        if !is_first {
            files.iter().for_each(|file| file.write(dir));
        }
    }
}
