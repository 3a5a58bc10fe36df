//! A disk as users describe it.

use crate::cpus::CpuList;
use crate::inject::Injection;
use crate::keys::KeyRing;
use crate::magic;
use crate::pools::NamedPool;
use fathom_core::{Legacy, Polling};
use fathom_filters::Spec;
use fathom_formats::Format;
use fathom_formats::served::{Beside, DEFAULT_METADATA_CACHE};
use fathom_storage::cached::MIN_SIZE;
use fathom_storage::{Cache, CacheTerms, EngineKind, KINDS, Location, OnSuperseded, OpenOptions};
use fathom_units::Timeout;
use std::path::PathBuf;

/// Where a disk's bytes are, what they mean, and how they are reached; not who may use it.
#[derive(Clone, Debug)]
pub struct Description {
    pub location: Location,
    /// None: raw, unless the image looks like something else.
    pub format: Option<Format>,
    /// Of a raw image: where the disk starts in it, and the disk's size.
    pub offset: Option<u64>,
    pub size: Option<u64>,
    /// Bytes of a qcow2 or QED image's tables in memory.
    pub metadata_cache: Option<u64>,
    /// Clusters that an image's tables name behind the end of its file read as zeroes.
    pub zero_missing_clusters: bool,
    /// Where the files that a qcow2 or QED image names may be, beside its own
    /// directory.
    pub allow_dirs: Vec<PathBuf>,
    /// The external data file of a qcow2 image, whatever the image calls it;
    /// None: what it calls it, to be read only.
    pub data_file: Option<PathBuf>,
    /// Where its dirty bitmaps are, and no other disk's; none: beside its image, if that is a file.
    pub bitmaps: Option<PathBuf>,
    /// What unlocks its images that are encrypted.
    pub keys: KeyRing,
    pub read_only: bool,
    pub engine: EngineKind,
    /// Pin guest memory, so that io_uring need not map it for each request.
    pub register_memory: bool,
    pub cache: Cache,
    /// How long the NBD server that has the disk may say nothing of a request
    /// before it is taken for dead; None: the default.
    pub server_timeout: Option<Timeout>,
    /// How long requests wait for an NBD server that is away; None: the default.
    pub server_reconnect: Option<Timeout>,
    /// Connections of each worker to an NBD server; None: the default.
    pub server_connections: Option<u8>,
    /// Where the image that is below a qcow2 or QED image comes from, if that is to be kept on this host.
    pub base: Option<String>,
    /// How such images are kept.
    pub base_cache: CacheTerms,
    /// Read an image that others may be writing. Needs `read_only`.
    pub force_share: bool,
    /// It takes the place of one that has the image, and will let go of it.
    pub succeeds: bool,
    /// These bytes are being served as a raw disk already, so a format's magic number in them is the
    /// guest's data.
    pub known_raw: bool,
    /// What that one has lent.
    pub legacy: Legacy,
    /// What becomes of an image to be written that a newer one has superseded.
    pub superseded: OnSuperseded,
    /// The guest may discard.
    pub discard: bool,
    /// Number of workers, at least 1.
    pub iothreads: usize,
    /// The CPUs that the workers may use, shared out among them; empty: any.
    pub cpus: CpuList,
    pub polling: Polling,
    /// The pool whose threads serve the disk, in place of the engine, the workers and their CPUs and
    /// polling that are given here; None: it has threads of its own.
    pub pool: Option<String>,
    /// Delay requests on purpose.
    pub inject: Option<Injection>,
    /// Filters around the disk, the first nearest to whoever uses it.
    pub filters: Vec<Spec>,
    /// What a job needs that changes its chain of images. What users make zeroes reads so by the image's own entries then,
    /// since its backing file may become another one.
    pub beside: Option<Beside>,
}

/// One for all that says how base images are kept.
const BASE: &str = "base-cache";

/// The formats keep this much in any case.
const MIN_METADATA_CACHE: u64 = 64 << 10;

impl Description {
    /// The defaults for this disk.
    pub fn new(location: Location) -> Description {
        Description {
            location,
            format: None,
            offset: None,
            size: None,
            metadata_cache: None,
            zero_missing_clusters: false,
            allow_dirs: Vec::new(),
            data_file: None,
            bitmaps: None,
            keys: KeyRing::default(),
            read_only: false,
            engine: EngineKind::default(),
            register_memory: false,
            cache: Cache::default(),
            server_timeout: None,
            server_reconnect: None,
            server_connections: None,
            base: None,
            base_cache: CacheTerms::default(),
            force_share: false,
            succeeds: false,
            known_raw: false,
            legacy: Legacy::default(),
            superseded: OnSuperseded::Refuse,
            discard: true,
            iothreads: 1,
            cpus: CpuList::default(),
            polling: Polling::default(),
            pool: None,
            inject: None,
            filters: Vec::new(),
            beside: None,
        }
    }

    /// Whether the image may be one of another format, which its user did not name.
    pub(crate) fn may_be_other_format(&self) -> bool {
        self.format.is_none() && !self.known_raw
    }

    /// Refuses what does not go together.
    pub fn check(&self) -> Result<(), String> {
        self.check_kind()?;
        self.check_window()?;
        let format = self.format.unwrap_or(Format::Raw);
        let has_tables = format.has_tables();
        if !has_tables && self.metadata_cache.is_some() {
            return Err("--metadata-cache: applies only to qcow2 and qed images (--format)".into());
        }
        if !has_tables && self.zero_missing_clusters {
            return Err(
                "--zero-missing-clusters: applies only to qcow2 and qed images (--format)".into(),
            );
        }
        if self
            .metadata_cache
            .is_some_and(|size| size < MIN_METADATA_CACHE)
        {
            return Err("--metadata-cache: less than the minimum of 64k".into());
        }
        if !has_tables && !self.allow_dirs.is_empty() {
            return Err("--allow-dir: applies only to qcow2 and qed images (--format)".into());
        }
        if self.base_cache.size < MIN_SIZE {
            return Err("--base-cache-size: less than the minimum of 64M".into());
        }
        if !has_tables && self.base.is_some() {
            return Err(
                "--base: applies only to qcow2 and qed images (--format), which have backing \
                 files"
                    .into(),
            );
        }
        if self.data_file.is_some() && format != Format::Qcow2 {
            return Err("--data-file: applies only to qcow2 images (--format)".into());
        }
        Ok(())
    }

    /// Where the image below comes from.
    pub(crate) fn base_location(&self) -> Result<Option<Location>, String> {
        let parsed = self.base.as_deref().map(Location::cached).transpose();
        parsed.map_err(|error| format!("--base: {error}"))
    }

    /// What only some kinds of storage take.
    fn check_kind(&self) -> Result<(), String> {
        let base = self.base_location()?;
        let given = [
            ("server-timeout", self.server_timeout.is_some()),
            ("server-reconnect", self.server_reconnect.is_some()),
            ("server-connections", self.server_connections.is_some()),
            (BASE, self.base_cache != CacheTerms::default()),
        ];
        for (option, _) in given.iter().filter(|(_, is_given)| *is_given) {
            let kinds = [Some(&self.location), base.as_ref()];
            if !kinds
                .into_iter()
                .flatten()
                .any(|at| at.kind().takes(option))
            {
                let forms = KINDS.iter().filter(|kind| kind.takes(option));
                let forms: Vec<_> = forms.map(|kind| kind.form).collect();
                return Err(match *option {
                    BASE => {
                        "--base-cache and its like: apply only to --base and cached:IMAGE".into()
                    }
                    option => format!("--{option}: applies only to {}", forms.join(", ")),
                });
            }
        }
        if self.location.kind().images {
            return Ok(());
        }
        if let Some(format) = self.format.filter(|format| *format != Format::Raw) {
            return Err(format!(
                "--format {format}: applies only to images in files and on Ceph"
            ));
        }
        match self.offset.or(self.size) {
            Some(_) => Err("--offset and --size: apply only to images in files and on Ceph".into()),
            None => Ok(()),
        }
    }

    /// The part of a raw image.
    fn check_window(&self) -> Result<(), String> {
        if let (Some(format), Some(_)) = (self.format, self.offset.or(self.size))
            && format != Format::Raw
        {
            return Err(format!(
                "--offset and --size: apply only to raw images; a {format} image has its own size"
            ));
        }
        for (option, value) in [("--offset", self.offset), ("--size", self.size)] {
            if value.is_some_and(|value| !value.is_multiple_of(512)) {
                return Err(format!("{option}: not a multiple of 512"));
            }
        }
        match self.size {
            Some(0) => Err("--size 0: a disk needs at least 512 bytes".into()),
            _ => Ok(()),
        }
    }

    /// With what is its pool's.
    pub(crate) fn in_pool(&self, pool: &NamedPool) -> Description {
        Description {
            engine: pool.options.engine,
            iothreads: pool.pool.threads(),
            ..self.clone()
        }
    }

    /// The disk is all of its file.
    pub(crate) fn is_whole(&self) -> bool {
        self.format.unwrap_or(Format::Raw) == Format::Raw && self.offset.or(self.size).is_none()
    }

    /// See [`Description::metadata_cache`].
    pub(crate) fn metadata_cache(&self) -> u64 {
        self.metadata_cache.unwrap_or(DEFAULT_METADATA_CACHE)
    }

    pub(crate) fn open_options(&self) -> OpenOptions {
        OpenOptions {
            cache: self.cache,
            read_only: self.read_only,
            discard: self.discard,
            growable: false,
            force_share: self.force_share,
            patient: true,
            succeeds: self.succeeds,
            keeps_lock: false,
            superseded: self.superseded,
            engine: self.engine,
            workers: self.iothreads,
            server_timeout: self.server_timeout,
            server_reconnect: self.server_reconnect,
            server_is_sought: true,
            server_connections: self.server_connections,
            base: self.base_cache.clone(),
            legacy: self.legacy.clone(),
        }
    }
}

/// The format of that name.
pub fn parse_format(text: &str) -> Result<Format, String> {
    match Format::from_name(text) {
        Err(_) if fathom_files::magic::FORMATS.contains(&text) => Err(magic::unsupported(text)),
        other => other.map_err(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn formats_of_others_are_named_as_such() {
        assert_eq!(parse_format("raw"), Ok(Format::Raw));
        assert_eq!(parse_format("qcow2"), Ok(Format::Qcow2));
        let error = parse_format("parallels").unwrap_err();
        assert!(error.contains("qemu-img convert"), "{error}");
        assert!(parse_format("ntfs").unwrap_err().contains("raw"));
    }

    #[test]
    fn options_that_do_not_go_together_are_told() {
        let refusal = |disk: &str, change: &dyn Fn(&mut Description)| {
            let location = Location::parse(OsStr::new(disk)).unwrap();
            let mut options = Description::new(location);
            change(&mut options);
            options.check().err().unwrap_or_default()
        };
        let qcow2 = |options: &mut Description| options.format = Some(Format::Qcow2);
        assert_eq!(refusal("image", &|_| ()), "");
        assert_eq!(refusal("image", &qcow2), "");
        assert_ne!(refusal("null:1G", &qcow2), "");
        assert_ne!(refusal("null:1G", &|o| o.offset = Some(0)), "");
        assert_eq!(refusal("image", &|o| o.offset = Some(512)), "");
        assert_eq!(refusal("image", &|o| o.size = Some(512)), "");
        assert_ne!(refusal("image", &|o| o.offset = Some(1)), "");
        assert_ne!(refusal("image", &|o| o.size = Some(0)), "");
        let both = |options: &mut Description| {
            qcow2(options);
            options.size = Some(512);
        };
        assert_ne!(refusal("image", &both), "");
        let cache = |format, size| {
            refusal("image", &|o| {
                o.format = format;
                o.metadata_cache = Some(size);
            })
        };
        assert_ne!(cache(None, 1 << 20), "");
        assert_ne!(cache(Some(Format::Raw), 1 << 20), "");
        assert_ne!(cache(Some(Format::Qed), 0), "");
        assert_eq!(cache(Some(Format::Qed), 64 << 10), "");
        assert_ne!(refusal("image", &|o| o.allow_dirs = vec!["x".into()]), "");
        assert_ne!(refusal("image", &|o| o.data_file = Some("x".into())), "");
        let patient = |o: &mut Description| o.server_timeout = "5s".parse().ok();
        assert_ne!(refusal("image", &patient), "");
        assert_eq!(refusal("nbd://host", &patient), "");
        assert_ne!(refusal("nbd://host", &qcow2), "");
        let many = |o: &mut Description| o.server_connections = Some(2);
        assert_ne!(refusal("rbd:pool/image", &many), "");
        assert_eq!(refusal("nbds://host", &many), "");
    }
}
