//! A disk as users describe it.

use crate::cpus::CpuList;
use crate::inject::Injection;
use crate::keys::KeyRing;
use crate::magic;
use crate::pools::NamedPool;
use fathom_core::{HandoverState, Polling};
use fathom_filters::Spec;
use fathom_formats::Format;
use fathom_formats::served::{DEFAULT_METADATA_CACHE, SideViewKind};
use fathom_storage::cached::MIN_SIZE;
use fathom_storage::{Cache, CacheTerms, EngineKind, KINDS, Location, OnSuperseded, OpenOptions};
use fathom_units::Timeout;
use std::path::PathBuf;

/// The location, meaning and access method of a disk's bytes; not who may use the disk.
#[derive(Clone, Debug)]
pub struct Description {
    /// Location of the disk's image.
    pub location: Location,
    /// The format. `None`: raw, unless the image looks like another format.
    pub format: Option<Format>,
    /// Start of the disk in a raw image, in bytes. `None`: the start of the image.
    pub offset: Option<u64>,
    /// Size of the disk in a raw image, in bytes. `None`: up to the end of the image.
    pub size: Option<u64>,
    /// Maximum bytes of a qcow2 or QED image's tables in memory.
    pub metadata_cache: Option<u64>,
    /// Whether clusters that an image maps beyond the end of its file read as zeroes.
    pub zero_missing_clusters: bool,
    /// Directories, besides the image's own, of the files that a qcow2 or QED image may name.
    pub allow_dirs: Vec<PathBuf>,
    /// The external data file of a qcow2 image, which overrides the name in the image.
    ///
    /// `None`: the file that the image names, for reading only.
    pub data_file: Option<PathBuf>,
    /// The directory of this disk's dirty bitmaps. `None`: next to the image, if it is a file.
    pub bitmaps: Option<PathBuf>,
    /// The keys of the disk's encrypted images.
    pub keys: KeyRing,
    /// Whether the disk is opened for reading only.
    pub read_only: bool,
    /// I/O engine of the workers.
    pub engine: EngineKind,
    /// Whether to pin guest memory, so that io_uring need not map it for each request.
    pub register_memory: bool,
    /// Cache mode of the disk's files.
    pub cache: Cache,
    /// Time without a reply after which an NBD server counts as dead. `None`: the default.
    pub server_timeout: Option<Timeout>,
    /// Time that requests wait for an unreachable NBD server. `None`: the default.
    pub server_reconnect: Option<Timeout>,
    /// Connections of each worker to an NBD server. `None`: the default.
    pub server_connections: Option<u8>,
    /// The source of the backing image of a qcow2 or QED image, if it is cached on this host.
    pub base: Option<String>,
    /// How such backing images are cached.
    pub base_cache: CacheTerms,
    /// Whether to read an image that others may be writing. Needs `read_only`.
    pub force_share: bool,
    /// Whether the disk replaces one that still has the image and will release it.
    pub succeeds: bool,
    /// Whether these bytes are served as a raw disk already. A format's magic number in them is the
    /// guest's data then.
    pub known_raw: bool,
    /// The state that the predecessor has handed over.
    pub handover_state: HandoverState,
    /// Reaction if a newer image has superseded an image that will be written.
    pub superseded: OnSuperseded,
    /// Whether the guest may discard.
    pub discard: bool,
    /// Number of workers, at least 1.
    pub iothreads: usize,
    /// The CPUs for the workers, divided among them; empty: any CPU.
    pub cpus: CpuList,
    /// How long idle workers poll before they sleep.
    pub polling: Polling,
    /// The pool whose threads serve the disk. `None`: the disk has its own threads.
    ///
    /// A pool replaces the engine, workers, CPUs and polling of this description.
    pub pool: Option<String>,
    /// A delay to inject into requests.
    pub inject: Option<Injection>,
    /// Filters around the disk, from the one nearest to the user inwards.
    pub filters: Vec<Spec>,
    /// The side view that a job needs that changes the disk's backing chain.
    ///
    /// Ranges that users zero are then recorded in the image's own tables, since its backing file
    /// may be replaced.
    pub side_view: Option<SideViewKind>,
}

/// Stands for all options about the cache of base images.
const BASE: &str = "base-cache";

/// Minimum size in bytes of the metadata cache, which the formats use in any case.
const MIN_METADATA_CACHE: u64 = 64 << 10;

impl Description {
    /// Creates a description with the default options.
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
            handover_state: HandoverState::default(),
            superseded: OnSuperseded::Refuse,
            discard: true,
            iothreads: 1,
            cpus: CpuList::default(),
            polling: Polling::default(),
            pool: None,
            inject: None,
            filters: Vec::new(),
            side_view: None,
        }
    }

    /// Returns whether the image may have another format, because the user did not name one.
    pub(crate) fn may_be_other_format(&self) -> bool {
        self.format.is_none() && !self.known_raw
    }

    /// Rejects options that exclude each other or do not apply.
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

    /// Returns the location of the backing image.
    pub(crate) fn base_location(&self) -> Result<Option<Location>, String> {
        let parsed = self.base.as_deref().map(Location::cached).transpose();
        parsed.map_err(|error| format!("--base: {error}"))
    }

    /// Rejects options that apply to other kinds of storage only.
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

    /// Checks the offset and size of a part of a raw image.
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

    /// Returns the description with the options of its pool.
    pub(crate) fn in_pool(&self, pool: &NamedPool) -> Description {
        Description {
            engine: pool.options.engine,
            iothreads: pool.pool.threads(),
            ..self.clone()
        }
    }

    /// Returns whether the disk is all of its file.
    pub(crate) fn is_whole(&self) -> bool {
        self.format.unwrap_or(Format::Raw) == Format::Raw && self.offset.or(self.size).is_none()
    }

    /// Returns [`Description::metadata_cache`], or its default.
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
            handover_state: self.handover_state.clone(),
        }
    }
}

/// Parses the name of a format.
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
