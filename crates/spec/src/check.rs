//! Options that exclude or need each other, and the paths in them.

use crate::disk::{DiskSpec, MAX_SERIAL};
use crate::name::{check_name, check_path};
use crate::socket::SocketSpec;
use fathom_stack::KeySource;
use std::path::PathBuf;

impl DiskSpec {
    /// Returns the paths of files and directories, except those of the image and the socket.
    pub fn files_mut(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let files = [
            &mut self.data_file,
            &mut self.bitmaps,
            &mut self.fuse,
            &mut self.trace,
            &mut self.pull_record,
            &mut self.base_cache,
            &mut self.base_manifest,
            &mut self.base_profile,
        ];
        let keys = self.keys.iter_mut().filter_map(KeySource::path_mut);
        { files.into_iter().flatten() }
            .chain(&mut self.allow_dirs)
            .chain(keys)
    }

    /// Refuses relative paths, whose meaning depends on a process's working directory.
    ///
    /// Relative paths of the files of base images are accepted, because existing definitions may
    /// have them.
    pub fn check_paths(&self) -> Result<(), String> {
        let socket = match &self.vhost_user {
            Some(SocketSpec::Path(path)) => Some(&**path),
            _ => None,
        };
        let files = [
            &self.data_file,
            &self.bitmaps,
            &self.fuse,
            &self.trace,
            &self.pull_record,
        ];
        let files = files.into_iter().flatten().chain(&self.allow_dirs);
        let files = files.map(PathBuf::as_path);
        let mut all = files.chain(self.image.path()).chain(socket);
        all.try_for_each(check_path)?;
        self.check_keys()
    }

    /// Refuses keys with relative paths, and keys that only the process that was started with them
    /// can read.
    pub fn check_keys(&self) -> Result<(), String> {
        let mut paths = self.keys.iter().filter_map(KeySource::path);
        paths.try_for_each(check_path)?;
        match self.keys.iter().find(|key| !key.is_anywhere()) {
            None => Ok(()),
            Some(key) => Err(format!(
                "{key}: only the server's command line accepts such a key; use file:PATH or \
                 credential:NAME"
            )),
        }
    }

    /// Refuses options that exclude each other or are out of range.
    pub fn check(&self, has_nbd: bool) -> Result<(), String> {
        if self.nbd == Some(true) && !has_nbd {
            return Err("nbd = true: needs a table [nbd]".into());
        }
        if self.force_share && !self.readonly {
            return Err("force-share: needs readonly = true".into());
        }
        for (option, value) in [("queues", self.queues), ("iothreads", self.iothreads)] {
            if value.is_some_and(|n| !(1..=256).contains(&n)) {
                return Err(format!("{option}: not a number from 1 to 256"));
            }
        }
        self.check_pool()?;
        self.check_fuse()?;
        if let Some(tenant) = &self.tenant {
            check_name(tenant).map_err(|_| {
                "tenant: not 1 to 64 letters, digits, -, _ and ., not beginning with a dot"
                    .to_owned()
            })?;
        }
        match &self.serial {
            Some(serial) if serial.len() > MAX_SERIAL => {
                Err(format!("serial: longer than {MAX_SERIAL} bytes"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses options that a file for programs (FUSE) excludes.
    fn check_fuse(&self) -> Result<(), String> {
        let problem = match (&self.fuse, self.fuse_writable) {
            (None, true) => "fuse-writable: needs fuse, the file that shows the disk",
            (None, false) => return Ok(()),
            (Some(_), true) if self.readonly => {
                "fuse-writable: excluded by readonly; remove one of the two"
            }
            (Some(_), _) if self.nbd_move || self.pull.is_some() => {
                "fuse: excluded by nbd-move and pull, because the mounted file cannot move to \
                 another host; remove it"
            }
            (Some(_), _) => return Ok(()),
        };
        Err(problem.into())
    }

    /// Refuses what is the pool's to say.
    fn check_pool(&self) -> Result<(), String> {
        let Some(pool) = &self.pool else {
            return Ok(());
        };
        let given = [
            ("aio", self.aio.is_some()),
            ("iothreads", self.iothreads.is_some()),
            ("cpus", self.cpus.is_some()),
            ("poll", self.poll.is_some()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => Err(format!(
                "{option}: excluded by pool = {pool:?}, whose table sets it for all disks of the \
                 pool; remove one of the two"
            )),
            None => Ok(()),
        }
    }
}
