//! A disk as it is written in files and in messages: the command line's options, by their names.

pub(crate) mod changes;
mod pool;
mod pull;
mod specs;

use crate::access::{Group, Mode};
use crate::alarm::Alarm;
use crate::socket_spec::SocketSpec;
use crate::text;
use fathom_core::Polling;
use fathom_filters::Spec;
use fathom_formats::Format;
use fathom_stack::{CpuList, Description, KeySource, parse_format};
use fathom_storage::cached::FetchRate;
use fathom_storage::{Cache, CacheTerms, EngineKind, Location};
use fathom_units::Timeout;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use utoipa::ToSchema;

pub use pool::PoolTable;

/// Options that say "no" on the command line are told by `false` here. What is left out has the
/// command line's default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DiskTable {
    // (The API has it in the path, too, and a file that is kept is named after it.)
    #[serde(default)]
    #[schema(pattern = "^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$", required = false)]
    pub name: String,
    #[serde(with = "text")]
    #[schema(value_type = String, examples("/srv/disk.qcow2", "memory:4G"))]
    pub image: Location,
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub vhost_user: Option<SocketSpec>,
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub socket_mode: Option<Mode>,
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub socket_group: Option<Group>,
    /// Whether NBD clients may use the disk [default: yes, if the server listens for them; no for a disk
    /// that the API adds while one of the server's listeners authenticates nobody]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<bool>,
    /// None: the disk's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export_name: Option<String>,
    /// Another server may take the disk over; its NBD clients only read.
    #[serde(default, skip_serializing_if = "is_false")]
    pub nbd_move: bool,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub export_description: String,
    #[serde(
        default,
        deserialize_with = "format",
        serialize_with = "text::optional::serialize",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub format: Option<Format>,
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    pub offset: Option<u64>,
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    pub size: Option<u64>,
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    pub metadata_cache: Option<u64>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub zero_missing_clusters: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub allow_dirs: Vec<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub data_file: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub bitmaps: Option<PathBuf>,
    /// What unlocks encrypted images.
    #[serde(default, with = "text::list", skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub keys: Vec<KeySource>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub readonly: bool,
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub aio: Option<EngineKind>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub register_memory: bool,
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub cache: Option<Cache>,
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub server_timeout: Option<Timeout>,
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub server_reconnect: Option<Timeout>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 16)]
    pub server_connections: Option<u8>,
    /// Where the image below comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base_cache: Option<PathBuf>,
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    pub base_cache_size: Option<u64>,
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub base_fetch: Option<FetchRate>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base_manifest: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base_profile: Option<PathBuf>,
    /// The server from which the disk is to come: an NBD URI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull: Option<String>,
    /// Where it is noted how far it is. None: beside the image, with .pull behind its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub pull_record: Option<PathBuf>,
    /// Bytes a second.
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    pub pull_speed: Option<u64>,
    /// The guest goes on here at once, and the disk follows: what it touches first.
    #[serde(default, skip_serializing_if = "is_false")]
    pub pull_post_copy: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    pub force_share: bool,
    /// Write to the image although a newer one has superseded it: what was written to that one since is lost.
    #[serde(default, skip_serializing_if = "is_false")]
    pub allow_superseded: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discard: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 256)]
    pub queues: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 256)]
    pub iothreads: Option<u16>,
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub cpus: Option<CpuList>,
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub poll: Option<Polling>,
    /// The pool whose threads serve it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Whose process serves it, where tenants have processes of their own. None: the disk's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$")]
    pub tenant: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// When who watches is told that requests take too long: `p99=5ms`, `read:p50=1ms`, `older=10s`.
    #[serde(default, with = "text::list", skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub alarms: Vec<Alarm>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub trace: Option<PathBuf>,
    #[serde(
        default,
        deserialize_with = "specs::read",
        serialize_with = "specs::write",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(value_type = Vec<String>)]
    pub filters: Vec<Spec>,
}

/// The longest name of a disk that is added.
const MAX_NAME: usize = 64;
/// The most virtqueues of a guest.
pub const DEFAULT_QUEUES: u16 = 64;
/// virtio-blk's GET_ID has room for so many bytes.
const MAX_SERIAL: usize = 20;

impl DiskTable {
    /// With nothing but defaults.
    pub fn new(name: String, image: Location) -> DiskTable {
        DiskTable {
            name,
            image,
            vhost_user: None,
            socket_mode: None,
            socket_group: None,
            nbd: None,
            export_name: None,
            nbd_move: false,
            export_description: String::new(),
            format: None,
            offset: None,
            size: None,
            metadata_cache: None,
            zero_missing_clusters: false,
            allow_dirs: Vec::new(),
            data_file: None,
            bitmaps: None,
            keys: Vec::new(),
            readonly: false,
            aio: None,
            register_memory: false,
            cache: None,
            server_timeout: None,
            server_reconnect: None,
            server_connections: None,
            base: None,
            base_cache: None,
            base_cache_size: None,
            base_fetch: None,
            base_manifest: None,
            base_profile: None,
            pull: None,
            pull_record: None,
            pull_speed: None,
            pull_post_copy: false,
            force_share: false,
            allow_superseded: false,
            discard: None,
            queues: None,
            iothreads: None,
            cpus: None,
            poll: None,
            pool: None,
            tenant: None,
            serial: None,
            alarms: Vec::new(),
            trace: None,
            filters: Vec::new(),
        }
    }

    /// The same, with nothing said that goes without saying.
    pub(crate) fn without_defaults(mut self) -> DiskTable {
        fn drop_default<T: PartialEq>(value: &mut Option<T>, default: T) {
            value.take_if(|value| *value == default);
        }
        let new = Description::new(self.image.clone());
        drop_default(&mut self.aio, new.engine);
        drop_default(&mut self.cache, new.cache);
        drop_default(&mut self.discard, new.discard);
        drop_default(&mut self.iothreads, new.iothreads as u16);
        drop_default(&mut self.poll, new.polling);
        drop_default(&mut self.queues, DEFAULT_QUEUES);
        drop_default(&mut self.export_name, self.name.clone());
        drop_default(&mut self.tenant, self.name.clone());
        self
    }

    /// Names the format of the image, as the file of a persistent disk does: a guest may write to a raw disk what
    /// looks like another format, and the disk is served again when the server restarts.
    pub(crate) fn with_format(mut self) -> DiskTable {
        self.format.get_or_insert(Format::Raw);
        self
    }

    /// With another image, of the same disk.
    pub(crate) fn on(self, image: Location, format: Option<Format>) -> DiskTable {
        let has_tables = format.is_some_and(Format::has_tables);
        DiskTable {
            format,
            metadata_cache: self.metadata_cache.filter(|_| has_tables),
            zero_missing_clusters: false,
            // What was said of the one that there was.
            offset: None,
            size: None,
            allow_dirs: Vec::new(),
            data_file: None,
            bitmaps: None,
            server_timeout: None,
            server_reconnect: None,
            server_connections: None,
            base: None,
            base_cache: None,
            base_cache_size: None,
            base_fetch: None,
            base_manifest: None,
            base_profile: None,
            pull: None,
            pull_record: None,
            pull_speed: None,
            pull_post_copy: false,
            allow_superseded: false,
            ..DiskTable { image, ..self }
        }
    }

    /// How base images are kept on this host.
    pub(crate) fn cache_terms(&self) -> CacheTerms {
        let new = CacheTerms::default();
        CacheTerms {
            dir: self.base_cache.clone().unwrap_or(new.dir),
            size: self.base_cache_size.unwrap_or(new.size),
            rate: self.base_fetch.map_or(new.rate, |rate| rate.0),
            manifest: self.base_manifest.clone(),
            profile: self.base_profile.clone(),
        }
    }

    /// Whether an NBD server is needed for the disk.
    pub(crate) fn is_server(&self, uri: &str) -> bool {
        self.image.to_string() == uri || self.pull.as_deref() == Some(uri)
    }

    /// Change options of a filter; an empty value is the option's default.
    pub(crate) fn set_filter(&mut self, index: usize, options: &BTreeMap<String, String>) {
        let Some(filter) = self.filters.get_mut(index) else {
            return;
        };
        for (key, value) in options {
            filter.options.retain(|(other, _)| other != key);
            if !value.is_empty() {
                filter.options.push((key.clone(), value.clone()));
            }
        }
    }

    /// Refuses paths that depend on whose working directory is meant.
    pub(crate) fn check_paths(&self) -> Result<(), String> {
        let socket = match &self.vhost_user {
            Some(SocketSpec::Path(path)) => Some(&**path),
            _ => None,
        };
        let files = [
            &self.data_file,
            &self.bitmaps,
            &self.trace,
            &self.pull_record,
        ];
        let files = files.into_iter().flatten();
        let files = files.chain(&self.allow_dirs).map(PathBuf::as_path);
        let mut all = files.chain(self.image.path()).chain(socket);
        all.try_for_each(check_path)?;
        self.check_keys()
    }

    /// Likewise of its keys; and those that only a process has that was started with them.
    pub(crate) fn check_keys(&self) -> Result<(), String> {
        let mut paths = self.keys.iter().filter_map(KeySource::path);
        paths.try_for_each(check_path)?;
        match self.keys.iter().find(|key| !key.is_anywhere()) {
            None => Ok(()),
            Some(key) => Err(format!(
                "{key}: a server is told of such keys on its own command line only: use file:PATH or \
                 credential:NAME"
            )),
        }
    }

    /// Refuses what does not go together.
    pub(crate) fn check(&self, has_nbd: bool) -> Result<(), String> {
        if self.nbd == Some(true) && !has_nbd {
            return Err("nbd = true needs a table [nbd]".into());
        }
        if self.force_share && !self.readonly {
            return Err("force-share needs readonly = true".into());
        }
        for (option, value) in [("queues", self.queues), ("iothreads", self.iothreads)] {
            if value.is_some_and(|n| !(1..=256).contains(&n)) {
                return Err(format!("{option} is not a number from 1 to 256"));
            }
        }
        self.check_pool()?;
        if let Some(tenant) = &self.tenant {
            check_name(tenant).map_err(|_| "a tenant's name is like that of a disk".to_owned())?;
        }
        match &self.serial {
            Some(serial) if serial.len() > MAX_SERIAL => {
                Err(format!("serial has more than {MAX_SERIAL} bytes"))
            }
            _ => Ok(()),
        }
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
                "{option} does not go with pool = {pool:?}: the pool's threads are as its own table says"
            )),
            None => Ok(()),
        }
    }
}

/// Refuses a name that cannot be a file's and a directory's, too: those of disks that are added, of
/// tenants and of pools.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    match (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(is_plain) {
        true => check_first(name),
        false => Err(format!(
            "a disk's name has 1 to {MAX_NAME} letters, digits, -, _ and ."
        )),
    }
}

/// Refuses a name that begins with a dot: such a file in disks-dir is hidden, or not finished.
pub fn check_first(name: &str) -> Result<(), String> {
    match name.starts_with('.') {
        true => Err(format!(
            "a disk's name does not begin with a dot: call it '{}', for example",
            name.trim_start_matches('.')
        )),
        false => Ok(()),
    }
}

/// A path from another process has to be absolute.
pub fn check_path(path: &Path) -> Result<(), String> {
    match path.is_absolute() {
        true => Ok(()),
        false => Err(format!("{}: the path has to be absolute", path.display())),
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

fn format<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Format>, D::Error> {
    text::optional::parse(from, parse_format)
}
