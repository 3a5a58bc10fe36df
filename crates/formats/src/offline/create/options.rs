//! Options of `qemu-img create -o`.

use super::choice::{choose, on_or_off};
use super::encryption::{self, Encryption};
use crate::qcow2::CompressionType;
use crate::{Error, Format, Result};
use fathom_units::unknown_name;
use std::collections::BTreeMap;

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

    /// Returns an option's value, if it is shown. Some options are shown only if they were given or
    /// differ from the default.
    pub(super) fn shown(&self, name: &str) -> Option<String> {
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
