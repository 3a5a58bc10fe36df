//! The descriptor, a text that lists the extents of a disk.

use crate::error::{Error, Result};
use crate::kind::Kind;
use std::collections::HashMap;

/// Maximum number of files of an image: 1 TiB in the usual pieces of 2 GiB.
const MAX_FILES: usize = 512;
const MAX_EXTENTS: usize = 16384;
/// Maximum number of sectors of a disk, so that its size in bytes fits into 63 bits.
const MAX_SECTORS: u64 = 1 << 54;
/// Content ID of the parent in an image without a parent.
const NO_PARENT: u32 = u32::MAX;

const CREATE_TYPES: [&str; 8] = [
    "monolithicSparse",
    "monolithicFlat",
    "twoGbMaxExtentSparse",
    "twoGbMaxExtentFlat",
    "streamOptimized",
    "vmfs",
    "vmfsSparse",
    "seSparse",
];

/// The contents of a descriptor.
///
/// All fields are checked except the file names and the type, which [`Descriptor::check`] checks
/// before files are opened.
#[derive(Debug)]
pub struct Descriptor {
    pub cid: u32,
    pub create_type: Option<String>,
    pub extents: Vec<Line>,
    /// File names, each once.
    pub names: Vec<String>,
}

/// An extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    pub sectors: u64,
    pub form: Form,
    /// Index of the extent's file in `names`; 0 if the extent has no file.
    pub name: usize,
    /// Offset of the extent in its file, in sectors; always 0 for sparse extents.
    pub offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Flat,
    Vmfs,
    Sparse,
    VmfsSparse,
    SeSparse,
    Zero,
}

impl Form {
    const ALL: [Form; 6] = [
        Form::Flat,
        Form::Vmfs,
        Form::Sparse,
        Form::VmfsSparse,
        Form::SeSparse,
        Form::Zero,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Form::Flat => "FLAT",
            Form::Vmfs => "VMFS",
            Form::Sparse => "SPARSE",
            Form::VmfsSparse => "VMFSSPARSE",
            Form::SeSparse => "SESPARSE",
            Form::Zero => "ZERO",
        }
    }
}

/// Parses a descriptor, which ends at the first zero byte.
pub fn parse(text: &[u8]) -> Result<Descriptor> {
    let end = text.iter().position(|&byte| byte == 0);
    let mut reading = Reading::default();
    for line in text[..end.unwrap_or(text.len())].split(|byte| matches!(byte, b'\n' | b'\r')) {
        let line = line.trim_ascii();
        if !line.is_empty() && line[0] != b'#' {
            reading.line(line)?;
        }
    }
    let missing = |what| Error::damaged(format!("its descriptor has no {what}"));
    let parent = reading.parent_cid.ok_or_else(|| missing("parentCID"))?;
    if parent != NO_PARENT || reading.has_parent {
        return Err(Error::differencing(Kind::Vmdk));
    }
    Ok(Descriptor {
        cid: reading.cid.ok_or_else(|| missing("CID"))?,
        create_type: reading.create_type,
        extents: reading.extents,
        names: reading.names,
    })
}

#[derive(Default)]
struct Reading {
    cid: Option<u32>,
    parent_cid: Option<u32>,
    has_parent: bool,
    create_type: Option<String>,
    extents: Vec<Line>,
    sectors: u64,
    names: Vec<String>,
    numbers: HashMap<String, usize>,
}

impl Reading {
    fn line(&mut self, line: &[u8]) -> Result<()> {
        let word = line.split(u8::is_ascii_whitespace).next();
        let word = word.unwrap_or_default().to_ascii_uppercase();
        if [&b"RW"[..], b"RDONLY", b"NOACCESS"].contains(&&word[..]) {
            let bad = || {
                let shown = String::from_utf8_lossy(&line[..line.len().min(80)]);
                Error::damaged(format!("its descriptor has a wrong extent {shown:?}"))
            };
            let is_readable = word != b"NOACCESS";
            return self
                .extent(&line[word.len()..], is_readable)
                .ok_or_else(bad)?;
        }
        let Some(equals) = line.iter().position(|&byte| byte == b'=') else {
            return Ok(());
        };
        let key = line[..equals].trim_ascii().to_ascii_lowercase();
        let value = String::from_utf8_lossy(line[equals + 1..].trim_ascii());
        let value = value.trim_matches('"');
        let number = || {
            let bad = || Error::damaged(format!("its descriptor has a wrong CID {value:?}"));
            u32::from_str_radix(value, 16).map_err(|_| bad())
        };
        match &key[..] {
            b"version" if !["1", "2", "3"].contains(&value) => {
                return Err(Error::unsupported(format!(
                    "a VMDK descriptor of version {value:?} is not supported, only of 1 to 3"
                )));
            }
            b"cid" => self.cid = Some(number()?),
            b"parentcid" => self.parent_cid = Some(number()?),
            b"parentfilenamehint" => self.has_parent |= !value.is_empty(),
            b"createtype" => self.create_type = Some(value.to_owned()),
            _ => {}
        }
        Ok(())
    }

    /// Parses the fields after the access mode: number of sectors, form, file name and offset.
    ///
    /// Returns `None` if a field is missing or invalid, or if further text follows.
    fn extent(&mut self, rest: &[u8], is_readable: bool) -> Option<Result<()>> {
        let rest = std::str::from_utf8(rest).ok()?;
        let (before, name, after) = match rest.split_once('"') {
            Some((before, rest)) => {
                let (name, after) = rest.split_once('"')?;
                (before, Some(name), after)
            }
            None => (rest, None, ""),
        };
        let mut words = before.split_ascii_whitespace();
        let sectors: u64 = words.next()?.parse().ok()?;
        let word = words.next()?;
        let mut forms = Form::ALL.into_iter();
        let form = forms.find(|form| form.name().eq_ignore_ascii_case(word))?;
        let mut numbers = after.split_ascii_whitespace().map(str::parse);
        let offset: Option<u64> = numbers.next().transpose().ok()?;
        let is_whole = words.next().is_none() && numbers.next().is_none();
        let has_name = name.is_some() || form == Form::Zero;
        let has_offset = match form {
            Form::Flat => offset.is_some(),
            Form::Vmfs | Form::Zero => true,
            Form::Sparse | Form::VmfsSparse | Form::SeSparse => offset.is_none(),
        };
        let offset = offset.unwrap_or(0);
        let is_small = sectors <= MAX_SECTORS && offset <= MAX_SECTORS;
        if sectors == 0 || !is_whole || !has_name || !has_offset || !is_small {
            return None;
        }
        if !is_readable && form != Form::Zero {
            return Some(Err(Error::unsupported(
                "a part of this VMDK image may not be accessed, so there is no whole disk to read",
            )));
        }
        let name = name.filter(|_| form != Form::Zero);
        Some(self.push(sectors, form, name, offset))
    }

    fn push(&mut self, sectors: u64, form: Form, name: Option<&str>, offset: u64) -> Result<()> {
        self.sectors += sectors;
        if self.sectors > MAX_SECTORS || self.extents.len() == MAX_EXTENTS {
            return Err(Error::TooLarge);
        }
        let name = match name {
            Some(name) => *{ self.numbers.entry(name.to_owned()) }.or_insert_with(|| {
                self.names.push(name.to_owned());
                self.names.len() - 1
            }),
            None => 0,
        };
        if self.names.len() > MAX_FILES {
            return Err(Error::unsupported(format!(
                "a VMDK image in more than {MAX_FILES} files is not supported"
            )));
        }
        self.extents.push(Line {
            sectors,
            form,
            name,
            offset,
        });
        Ok(())
    }
}

impl Descriptor {
    /// Checks the type and that all file names are bare. Must be called before the files are
    /// opened.
    pub fn check(&self) -> Result<&'static str> {
        let name = self.create_type.as_deref().unwrap_or_default();
        let mut types = CREATE_TYPES.into_iter();
        let create_type = types.find(|known| known.eq_ignore_ascii_case(name));
        self.names.iter().try_for_each(|name| check_name(name))?;
        create_type.ok_or_else(|| {
            Error::unsupported(format!(
                "a VMDK image of the type {name:?} is not supported, only of {}",
                CREATE_TYPES.join(", ")
            ))
        })
    }
}

/// Checks that a name denotes a file next to the image, so that an image cannot name the host's
/// files.
fn check_name(name: &str) -> Result<()> {
    let is_bad = |letter: char| matches!(letter, '/' | '\\') || letter.is_control();
    if name.is_empty()
        || name.len() > 255
        || name == "."
        || name.contains("..")
        || name.contains(is_bad)
    {
        return Err(Error::unsupported(format!(
            "this VMDK image has a part {name:?}, which is not a bare file name: put all its parts \
             into one directory, and their names without a path into its descriptor"
        )));
    }
    Ok(())
}
