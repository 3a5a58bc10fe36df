//! Parses tracefs's descriptions of records: each event's `format` file, and `events/header_page`
//! for the pages that hold the records.

/// How a field's bytes are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A single number, or bytes at a fixed offset.
    Plain,
    /// `__data_loc`: a u32 with the offset from the record's start (low half) and the length (high
    /// half).
    DataLoc,
    /// `__rel_loc`: like `__data_loc`, but the offset counts from the end of this field.
    RelLoc,
}

/// A field of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name of the field, such as `common_pid`.
    pub name: String,
    /// Offset from the record's start, in bytes.
    pub offset: usize,
    /// Size of the whole field in bytes.
    pub size: usize,
    /// Whether the number is signed.
    pub signed: bool,
    /// Encoding of the field's bytes.
    pub shape: Shape,
    /// Number of elements of a fixed array; 1 for a single value.
    pub elements: usize,
}

/// The record format of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Format {
    /// Name of the event, such as `sched_switch`.
    pub name: String,
    /// Value of `common_type`, which identifies the event.
    pub id: u16,
    /// Fields of the record, in the order of the `format` file.
    pub fields: Vec<Field>,
    /// The `print fmt` text, by which the kernel prints the event.
    pub print: String,
}

/// Maximum end of a field in bytes: a page of a ring buffer has at most 64 KiB (subbuf_size).
const MAX_OFFSET: usize = 1 << 16;

impl Format {
    /// Parses a `format` file.
    ///
    /// # Errors
    /// The name of the missing part.
    pub fn parse(text: &str) -> Result<Format, String> {
        let mut format = Format {
            name: String::new(),
            id: 0,
            fields: Vec::new(),
            print: String::new(),
        };
        let mut id = None;
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("name:") {
                format.name = name.trim().to_owned();
            } else if let Some(number) = line.strip_prefix("ID:") {
                id = number.trim().parse().ok();
            } else if let Some(print) = line.strip_prefix("print fmt:") {
                format.print = print.trim().to_owned();
            } else if let Some(field) = parse_field(line) {
                format.fields.push(field);
            }
        }
        if format.name.is_empty() {
            return Err("no name in its format file".into());
        }
        let name = format.name.clone();
        format.id = id.ok_or(format!("{name}: no ID in its format file"))?;
        for common in ["common_type", "common_pid"] {
            if format.field(common).is_none() {
                return Err(format!("{name}: no field {common} in its format file"));
            }
        }
        Ok(format)
    }

    /// Returns the field with this name.
    pub fn field(&self, name: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.name == name)
    }
}

/// Parses `field:unsigned long args[6]; offset:16; size:48; signed:0;`.
fn parse_field(line: &str) -> Option<Field> {
    let mut parts = line.trim().split(';').map(str::trim);
    let declaration = parts
        .next()
        .and_then(|part| part.strip_prefix("field:").map(str::trim))?;
    let (mut offset, mut size, mut signed) = (None, None, false);
    for part in parts {
        match part.split_once(':') {
            Some(("offset", number)) => offset = number.trim().parse().ok(),
            Some(("size", number)) => size = number.trim().parse().ok(),
            Some(("signed", number)) => signed = number.trim() == "1",
            _ => {}
        }
    }
    let (offset, size): (usize, usize) = (offset?, size?);
    if offset.checked_add(size)? > MAX_OFFSET {
        return None;
    }
    let (bare, elements) = match declaration.split_once('[') {
        Some((bare, count)) => (bare, count.split(']').next().and_then(|n| n.parse().ok())),
        None => (declaration, Some(1)),
    };
    let shape = match declaration.split_whitespace().next()? {
        "__data_loc" => Shape::DataLoc,
        "__rel_loc" => Shape::RelLoc,
        _ => Shape::Plain,
    };
    // In `__data_loc char[] name`, the name follows the brackets.
    let name = match shape {
        Shape::Plain => bare.split_whitespace().next_back()?,
        _ => declaration.split_whitespace().next_back()?,
    };
    Some(Field {
        name: name.trim_start_matches('*').to_owned(),
        offset,
        size,
        signed,
        shape,
        // If the array length is a constant's name, only the size in bytes is known.
        elements: elements.filter(|&n| n > 0).unwrap_or(1),
    })
}

impl Field {
    /// Returns the number in this field, or in one of its elements. Returns `None` if the record is
    /// too short or the element is not a number.
    #[inline]
    pub fn number(&self, record: &[u8], element: usize) -> Option<u64> {
        if element >= self.elements {
            return None;
        }
        let size = self.size / self.elements;
        let at = self.offset + element * size;
        number(record.get(at..at.checked_add(size)?)?, self.signed)
    }

    /// Returns the bytes of this field, or the bytes that a dynamic field refers to.
    pub fn bytes<'a>(&self, record: &'a [u8]) -> Option<&'a [u8]> {
        let end = self.offset.checked_add(self.size)?;
        let place = record.get(self.offset..end)?;
        let base = match self.shape {
            Shape::Plain => return Some(place),
            Shape::DataLoc => 0,
            Shape::RelLoc => end,
        };
        let location = number(place, false)?;
        let start = base + (location & 0xffff) as usize;
        record.get(start..start + (location >> 16 & 0xffff) as usize)
    }

    /// Returns the bytes up to the first zero.
    pub fn text<'a>(&self, record: &'a [u8]) -> Option<&'a [u8]> {
        let bytes = self.bytes(record)?;
        let end = bytes.iter().position(|&byte| byte == 0);
        Some(&bytes[..end.unwrap_or(bytes.len())])
    }
}

/// Returns a little-endian number of 1, 2, 4 or 8 bytes, with sign extension if `signed`.
#[inline]
pub(super) fn number(bytes: &[u8], signed: bool) -> Option<u64> {
    Some(match *bytes {
        [a] if signed => a as i8 as u64,
        [a] => u64::from(a),
        [a, b] if signed => i16::from_le_bytes([a, b]) as u64,
        [a, b] => u64::from(u16::from_le_bytes([a, b])),
        [a, b, c, d] if signed => i32::from_le_bytes([a, b, c, d]) as u64,
        [a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        _ => return None,
    })
}

/// Offsets in a page of the ring buffer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Size of a whole page in bytes.
    pub page: usize,
    /// Offset of the field that counts the bytes in use.
    pub commit: usize,
    /// Size of that field in bytes.
    pub commit_size: usize,
    /// Offset of the first record.
    pub data: usize,
}

impl Layout {
    /// Parses `events/header_page`.
    ///
    /// # Errors
    /// When it describes an unsupported page layout.
    pub fn parse(text: &str) -> Result<Layout, String> {
        let fields: Vec<Field> = text.lines().filter_map(parse_field).collect();
        let find = |name: &str| {
            let field = fields.iter().find(|field| field.name == name);
            field.ok_or(format!("events/header_page has no {name}"))
        };
        let (time, commit, data) = (find("timestamp")?, find("commit")?, find("data")?);
        let layout = Layout {
            page: data.offset + data.size,
            commit: commit.offset,
            commit_size: commit.size,
            data: data.offset,
        };
        let is_sane = (time.offset, time.size) == (0, 8)
            && matches!(commit.size, 4 | 8)
            && commit.offset >= 8
            && commit.offset + commit.size <= data.offset
            && data.size >= 8;
        if !is_sane {
            return Err("events/header_page describes a page that fathom does not know".into());
        }
        Ok(layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SYS_ENTER: &str = "\
name: sys_enter
ID: 443
format:
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;
	field:unsigned char common_flags;	offset:2;	size:1;	signed:0;
	field:unsigned char common_preempt_count;	offset:3;	size:1;	signed:0;
	field:int common_pid;	offset:4;	size:4;	signed:1;

	field:long id;	offset:8;	size:8;	signed:1;
	field:unsigned long args[6];	offset:16;	size:48;	signed:0;
	field:__data_loc char[] cmd;	offset:64;	size:4;	signed:0;

print fmt: \"NR %ld (%lx)\", REC->id, REC->args[0]
";

    #[test]
    fn fields_are_found_where_the_file_says() {
        let format = Format::parse(SYS_ENTER).unwrap();
        assert_eq!((format.name.as_str(), format.id), ("sys_enter", 443));
        let mut record = [0; 80];
        record[8..16].copy_from_slice(&(-7i64).to_le_bytes());
        record[32..40].copy_from_slice(&99u64.to_le_bytes());
        record[64..68].copy_from_slice(&(70u32 | 4 << 16).to_le_bytes());
        record[70..74].copy_from_slice(b"ab\0c");
        let field = |name| format.field(name).unwrap();
        assert_eq!(field("id").number(&record, 0), Some(-7i64 as u64));
        assert_eq!(field("args").number(&record, 2), Some(99));
        assert_eq!(field("args").number(&record, 6), None);
        assert_eq!(field("args").number(&record[..40], 3), None);
        assert_eq!(field("cmd").text(&record), Some(&b"ab"[..]));
        assert_eq!(field("cmd").text(&record[..72]), None);
    }

    #[test]
    fn a_file_without_what_is_needed_is_refused() {
        let without = |what: &str| {
            let text: Vec<&str> = SYS_ENTER.lines().filter(|l| !l.contains(what)).collect();
            Format::parse(&text.join("\n")).unwrap_err()
        };
        assert!(without("name:").contains("no name"));
        assert!(without("ID:").contains("sys_enter: no ID"));
        assert!(without("common_pid").contains("common_pid"));
    }

    #[test]
    fn the_page_is_described_by_its_header() {
        let text = "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;
\tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;
\tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;
\tfield: char data;\toffset:16;\tsize:4080;\tsigned:0;\n";
        let layout = Layout::parse(text).unwrap();
        assert_eq!((layout.page, layout.commit, layout.data), (4096, 8, 16));
        assert!(Layout::parse(&text.replace("size:4080", "size:0")).is_err());
        assert!(Layout::parse("").is_err());
    }

    proptest! {
        /// Parsing and reading return for every format file and every record.
        #[test]
        fn no_format_is_too_strange(
            lines in proptest::collection::vec(
                "field:[a-z_ ]{0,20}(\\[[0-9a-z]{0,3}\\])? ?[a-z]{0,4};\
                 \toffset:[0-9]{0,20};\tsize:[0-9]{0,20};\tsigned:[01];", 0..6),
            record in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let text = format!("name: x\nID: 1\n\tfield:short common_type;\toffset:0;\tsize:2;\n\
                field:int common_pid;\toffset:4;\tsize:4;\n{}", lines.join("\n"));
            let format = Format::parse(&text).unwrap();
            for field in &format.fields {
                let _ = (field.number(&record, 0), field.number(&record, 7), field.text(&record));
            }
            let _ = Layout::parse(&lines.join("\n"));
        }
    }
}
