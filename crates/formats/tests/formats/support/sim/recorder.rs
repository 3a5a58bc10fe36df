//! A storage whose file is in a [`World`].

use super::world::World;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, RangeLimits, RequestId, Stage};
use fathom_files::ImageFile;
use fathom_formats::served::{Opener, Storage};
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file of the world.
pub struct Recorder {
    pub world: Arc<World>,
    pub file: usize,
    path: PathBuf,
}

impl Recorder {
    pub fn new(world: Arc<World>, file: usize, name: &str) -> Arc<Recorder> {
        Arc::new(Recorder {
            world,
            file,
            path: PathBuf::from(name),
        })
    }
}

fn told<T>(result: Result<T, i32>) -> io::Result<T> {
    result.map_err(io::Error::from_raw_os_error)
}

impl ImageFile for Recorder {
    fn grows(&self) -> bool {
        !self.world.state().device
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        told(self.world.state().read(self.file, buf, offset))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.world.state();
        let now = state.tick();
        told(state.write(self.file, offset, buf, now, false))
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.world.state().files[self.file].len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        told(self.world.state().set_len(self.file, len))
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.world.state();
        let now = state.tick();
        told(state.flush(self.file, now))
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut state = self.world.state();
        let longer = state.files[self.file].len().max(offset + len);
        told(state.set_len(self.file, longer))
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut state = self.world.state();
        let now = state.tick();
        told(state.discard(self.file, offset, len, now, false))
    }
}

impl Storage for Recorder {
    fn disk(&self) -> &dyn Disk {
        self
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> &dyn ImageFile {
        self
    }

    fn identity(&self) -> (u64, u64) {
        (0, self.file as u64)
    }
}

impl Disk for Recorder {
    fn info(&self) -> DiskInfo {
        let limits = Some(RangeLimits {
            alignment: 512,
            max_len: 1 << 30,
        });
        DiskInfo {
            size: self.world.state().files[self.file].len(),
            block_size: 512,
            physical_block_size: 4096,
            optimal_io_size: 0,
            read_only: false,
            write_cache: true,
            discard: limits,
            write_zeroes: limits,
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.sync().map_err(|source| DiskError::Io {
            path: self.path.clone(),
            what: "cannot be flushed",
            source,
        })
    }

    fn channel(&self, _cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let world = self.world.clone();
        let worker = world.state().worker;
        Ok(Box::new(RecorderChannel {
            world,
            file: self.file,
            worker,
            in_flight: HashSet::new(),
        }))
    }
}

struct RecorderChannel {
    world: Arc<World>,
    file: usize,
    worker: usize,
    in_flight: HashSet<RequestId>,
}

impl Channel for RecorderChannel {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Device);
        assert!(self.in_flight.insert(id), "given to it twice");
        self.world
            .submitted(self.worker, self.file, id, &cx.slab[id]);
    }

    fn complete(&mut self, cx: &mut Cx, id: RequestId, _tag: u16, result: i32) {
        assert!(self.in_flight.remove(&id), "it is another storage's");
        cx.complete(id, -result);
    }
}

/// Opens a world's files by their names.
pub struct Names(pub HashMap<String, Arc<Recorder>>);

impl Opener for Names {
    fn open(&self, image: &Path, name: &[u8], _: bool) -> Result<Arc<dyn Storage>, DiskError> {
        let name = String::from_utf8_lossy(name).into_owned();
        match self.0.get(&name) {
            Some(file) => Ok(file.clone()),
            None => Err(DiskError::Unusable {
                path: image.to_owned(),
                problem: format!("there is no {name}"),
            }),
        }
    }

    fn open_data_file(
        &self,
        image: &Path,
        name: &[u8],
        writable: bool,
    ) -> Result<Arc<dyn Storage>, DiskError> {
        self.open(image, name, writable)
    }
}
