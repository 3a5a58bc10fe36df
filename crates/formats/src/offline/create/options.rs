//! Options of `qemu-img create -o`.

use super::choice::{choose, on_or_off};
use super::encryption::{self, Encryption};
use crate::qcow2::CompressionType;
use crate::{Error, Format, Result};
use fathom_units::unknown_name;
use std::collections::BTreeMap;
use std::fmt;

/// The space that is allocated when an image is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// Tables. In a file, the data is a hole; on a device, the data is the device's former
    /// contents.
    Metadata,
    /// Tables and space for data, by fallocate(2). Not possible on devices.
    Falloc,
    /// Tables and space for data, by writing zeroes.
    Full,
}

impl Preallocation {
    fn name(self) -> &'static str {
        match self {
            Preallocation::Off => "off",
            Preallocation::Metadata => "metadata",
            Preallocation::Falloc => "falloc",
            Preallocation::Full => "full",
        }
    }
}

/// The backing file of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// The name as it will be stored in the image.
    pub name: String,
    /// The format of the backing file. Without a format, readers would have to guess, which is
    /// refused.
    pub format: Option<Format>,
}

/// Options of qcow2 images only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2Options {
    /// Version of the format, 2 or 3: `compat=0.10` or `1.1`.
    pub version: u32,
    /// Width of a refcount in bits.
    pub refcount_bits: u64,
    /// Whether refcounts are written late.
    pub lazy_refcounts: bool,
    /// Whether clusters have subclusters.
    pub extended_l2: bool,
    /// Compression method of compressed clusters.
    pub compression: CompressionType,
    /// The name of the external data file as it will be stored in the image.
    pub data_file: Option<String>,
    /// Whether the external data file is a raw image by itself.
    pub data_file_raw: bool,
}

/// The properties of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The image's format.
    pub format: Format,
    /// The disk's size in bytes, if it is among the options.
    pub size: Option<u64>,
    /// Cluster size in bytes.
    pub cluster_size: u64,
    /// Size of a table in clusters, in QED images only.
    pub table_size: u64,
    /// The backing file, if any.
    pub backing: Option<Backing>,
    /// The space that is allocated at once.
    pub preallocation: Preallocation,
    /// Options of qcow2 images only.
    pub qcow2: Qcow2Options,
    /// Encryption, for luks and qcow2 images only.
    pub encryption: Encryption,
    /// The options as the user wrote them. Some are shown even if they have the default value.
    given: BTreeMap<&'static str, String>,
}

impl Options {
    /// Returns the defaults, which are QEMU's.
    pub fn new(format: Format) -> Options {
        Options {
            format,
            size: None,
            cluster_size: 64 << 10,
            table_size: crate::qed::DEFAULT_TABLE_SIZE.into(),
            backing: None,
            preallocation: Preallocation::Off,
            qcow2: Qcow2Options {
                version: 3,
                refcount_bits: 16,
                lazy_refcounts: false,
                extended_l2: false,
                compression: CompressionType::Deflate,
                data_file: None,
                data_file_raw: false,
            },
            encryption: Encryption::new(format),
            given: BTreeMap::new(),
        }
    }

    /// Returns the names of a format's options.
    pub fn names(format: Format) -> &'static [&'static str] {
        match format {
            Format::Raw => &["preallocation", "size"],
            Format::Luks => &encryption::NAMES,
            Format::Foreign(_) => &[],
            Format::Qed => &[
                "backing_file",
                "backing_fmt",
                "cluster_size",
                "size",
                "table_size",
            ],
            Format::Qcow2 => &[
                "backing_file",
                "backing_fmt",
                "cluster_size",
                "compat",
                "compression_type",
                "data_file",
                "data_file_raw",
                "encrypt.cipher-alg",
                "encrypt.cipher-mode",
                "encrypt.format",
                "encrypt.hash-alg",
                "encrypt.iter-time",
                "encrypt.ivgen-alg",
                "extended_l2",
                "lazy_refcounts",
                "preallocation",
                "refcount_bits",
                "size",
            ],
        }
    }

    /// Sets an option, as in `-o name=value`. `parse_size` parses sizes.
    pub fn set(
        &mut self,
        name: &str,
        value: &str,
        parse_size: fn(&str) -> std::result::Result<u64, String>,
    ) -> Result<()> {
        let names = Options::names(self.format);
        let Some(known) = names.iter().find(|known| **known == name) else {
            let what = format!("option of {} images:", self.format);
            let list = format!("'fathom img create -f {} -o help' lists all", self.format);
            return Err(Error::usage(unknown_name(&what, name, names, &list)));
        };
        let size = || parse_size(value).map_err(|e| Error::usage(format!("{name}: {e}")));
        let qcow2 = &mut self.qcow2;
        match name {
            _ if name.starts_with(encryption::PREFIX) => {
                self.encryption
                    .set(&name[encryption::PREFIX.len()..], value)?;
            }
            "size" => self.size = Some(size()?),
            "cluster_size" => self.cluster_size = size()?,
            "table_size" => self.table_size = size()?,
            "refcount_bits" => qcow2.refcount_bits = size()?,
            "backing_file" => {
                let format = self.backing.take().and_then(|b| b.format);
                let name = value.to_owned();
                self.backing = Some(Backing { name, format });
            }
            "backing_fmt" => {
                let name = self.backing.take().map_or_else(String::new, |b| b.name);
                let format = Some(Format::from_name(value)?);
                self.backing = Some(Backing { name, format });
            }
            "compat" => {
                qcow2.version = choose(
                    name,
                    value,
                    &[("0.10", 2), ("v2", 2), ("1.1", 3), ("v3", 3)],
                )?;
            }
            "compression_type" => {
                let (zlib, zstd) = (CompressionType::Deflate, CompressionType::Zstd);
                qcow2.compression = choose(name, value, &[("zlib", zlib), ("zstd", zstd)])?;
            }
            "data_file" => qcow2.data_file = Some(value.to_owned()),
            "data_file_raw" => qcow2.data_file_raw = on_or_off(name, value)?,
            "extended_l2" => qcow2.extended_l2 = on_or_off(name, value)?,
            "lazy_refcounts" => qcow2.lazy_refcounts = on_or_off(name, value)?,
            _ if self.format == Format::Luks => self.encryption.set(name, value)?,
            _ => {
                use Preallocation::{Falloc, Full, Metadata, Off};
                let all = [Off, Metadata, Falloc, Full].map(|p| (p.name(), p));
                self.preallocation = choose(name, value, &all)?;
            }
        }
        self.given.insert(known, value.to_owned());
        Ok(())
    }

    /// Returns the names of the options that were given.
    pub fn given(&self) -> impl Iterator<Item = &'static str> {
        self.given.keys().copied()
    }

    /// Validates everything that does not depend on the disk's size.
    pub fn validate(&self) -> Result<()> {
        let refuse = |problem: &str| Err(Error::usage(problem));
        if let Some(backing) = &self.backing {
            let len = backing.name.len();
            if len == 0 {
                return refuse("backing_fmt needs backing_file");
            }
            if len > 1023 || backing.name.contains('\0') {
                return refuse("the backing file's name is invalid, or exceeds 1023 bytes");
            }
        }
        match self.format {
            Format::Raw if self.preallocation == Preallocation::Metadata => {
                refuse("preallocation=metadata: applies only to qcow2, because raw has no metadata")
            }
            Format::Raw => Ok(()),
            Format::Luks => self.validate_luks(),
            Format::Foreign(_) => Err(Error::only_read(self.format)),
            Format::Qed => self.validate_qed(),
            Format::Qcow2 => self.validate_qcow2(),
        }
    }

    fn validate_luks(&self) -> Result<()> {
        match self.encryption.luks.check() {
            Ok(()) => Ok(()),
            Err(error) => Err(Error::usage(error.to_string())),
        }
    }

    fn validate_qed(&self) -> Result<()> {
        let (cluster, table) = (self.cluster_size, self.table_size);
        if !cluster.is_power_of_two() || !(4 << 10..=64 << 20).contains(&cluster) {
            return Err(Error::usage(
                "cluster_size: not a power of two from 4k to 64M",
            ));
        }
        if !table.is_power_of_two() || table > 16 {
            return Err(Error::usage("table_size: not 1, 2, 4, 8 or 16 clusters"));
        }
        Ok(())
    }

    fn validate_qcow2(&self) -> Result<()> {
        let (cluster, q) = (self.cluster_size, &self.qcow2);
        let refuse = |problem: &str| Err(Error::usage(problem));
        if !cluster.is_power_of_two() || !(512..=2 << 20).contains(&cluster) {
            return refuse("cluster_size: not a power of two from 512 to 2M");
        }
        if !q.refcount_bits.is_power_of_two() || q.refcount_bits > 64 {
            return refuse("refcount_bits: not a power of two from 1 to 64");
        }
        if q.extended_l2 && cluster < 16 << 10 {
            return refuse("extended_l2=on: needs a cluster_size of at least 16k");
        }
        let needs_v3 = [
            (q.refcount_bits != 16, "refcount_bits other than 16"),
            (q.lazy_refcounts, "lazy_refcounts=on"),
            (q.extended_l2, "extended_l2=on"),
            (
                q.compression != CompressionType::Deflate,
                "compression_type other than zlib",
            ),
            (q.data_file.is_some(), "data_file"),
        ];
        if let Some((_, what)) = needs_v3.iter().find(|(wanted, _)| *wanted && q.version < 3) {
            return Err(Error::usage(format!("{what} needs compat=1.1")));
        }
        if q.data_file_raw && q.data_file.is_none() {
            return refuse("data_file_raw=on: needs data_file");
        }
        if q.data_file_raw && self.backing.is_some() {
            return refuse("data_file_raw=on: excludes a backing file");
        }
        if q.data_file
            .as_deref()
            .is_some_and(|n| n.is_empty() || n.contains('\0'))
        {
            return refuse("the data file's name is invalid");
        }
        let preallocates = self.preallocation != Preallocation::Off;
        let encrypts = self.encryption.is_wanted;
        if !encrypts
            && self
                .given()
                .any(|name| name.starts_with(encryption::PREFIX))
        {
            return refuse("options of encryption: need encrypt.format=luks");
        }
        if encrypts && preallocates {
            return refuse(
                "preallocation: excludes encryption, because preallocated data would read as \
                 random bytes",
            );
        }
        if encrypts && q.data_file.is_some() {
            return refuse("encrypt.format: excludes data_file");
        }
        if preallocates && self.backing.is_some() && !q.extended_l2 {
            return refuse("preallocation: needs extended_l2=on for an image with a backing file");
        }
        Ok(())
    }
}

/// Formats the options as `qemu-img create` does.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fmt={}", self.format)?;
        let names: &[&str] = match self.format {
            Format::Raw => &["size", "preallocation"],
            Format::Luks | Format::Foreign(_) => &["size"],
            Format::Qed => &[
                "size",
                "backing_file",
                "backing_fmt",
                "cluster_size",
                "table_size",
            ],
            Format::Qcow2 => &[
                "cluster_size",
                "extended_l2",
                "preallocation",
                "compression_type",
                "encrypt.format",
                "size",
                "compat",
                "backing_file",
                "backing_fmt",
                "data_file",
                "data_file_raw",
                "lazy_refcounts",
                "refcount_bits",
            ],
        };
        for name in names {
            if let Some(value) = self.shown(name) {
                write!(f, " {name}={value}")?;
            }
        }
        Ok(())
    }
}

impl Options {
    /// Returns an option's value, if it is shown. Some options are shown only if they were given or
    /// differ from the default.
    fn shown(&self, name: &str) -> Option<String> {
        let on_off = |on: bool| if on { "on" } else { "off" }.to_owned();
        let (q, given) = (&self.qcow2, self.given.contains_key(name));
        let backing = self.backing.as_ref();
        match name {
            "size" => self.size.map(|size| size.to_string()),
            "cluster_size" => Some(self.cluster_size.to_string()),
            "extended_l2" => Some(on_off(q.extended_l2)),
            "lazy_refcounts" => Some(on_off(q.lazy_refcounts)),
            "compression_type" => Some(q.compression.name().to_owned()),
            "refcount_bits" => Some(q.refcount_bits.to_string()),
            "backing_file" => backing.map(|b| b.name.clone()),
            "backing_fmt" => backing.and_then(|b| Some(b.format?.name().to_owned())),
            "data_file" => q.data_file.clone(),
            "data_file_raw" => (given || q.data_file_raw).then(|| on_off(q.data_file_raw)),
            "compat" => match self.given.get(name) {
                Some(text) => Some(text.clone()),
                None => (q.version == 2).then(|| "0.10".to_owned()),
            },
            "encrypt.format" => self.encryption.is_wanted.then(|| "luks".to_owned()),
            "table_size" => {
                let is_default = self.table_size == u64::from(crate::qed::DEFAULT_TABLE_SIZE);
                (given || !is_default).then(|| self.table_size.to_string())
            }
            _ => {
                let how = self.preallocation;
                (given || how != Preallocation::Off).then(|| how.name().to_owned())
            }
        }
    }
}
