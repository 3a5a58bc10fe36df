//! Converts kernel records to events: the plan maps fields of a record to arguments of an event.

use fathom_run::{Event, Kind, MAX_ARGS, flags};

use super::format::{Field, Format};
use super::page::Record;

/// The source of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A field that every kernel has. Without it, the event cannot be used.
    Field(&'static str),
    /// The first of these fields that exists.
    Either(&'static str, &'static str),
    /// A field that some kernels lack; the argument is then 0.
    Optional(&'static str),
    /// An element of an array.
    Element(&'static str, usize),
    /// A field with a positive or negative errno, of which the absolute value is used. The first of
    /// the two fields that exists.
    Errno(&'static str, &'static str),
    /// The block layer's letters for operation and flags, converted by [`flags_of`].
    Rwbs(&'static str),
    /// A dev_t, replaced by its alias from [`Plan::alias_device`] if it has one.
    Device(&'static str),
    /// No field: the argument is 0.
    Nothing,
}

impl Source {
    /// Returns the field without which the event cannot be used, if any.
    pub fn needed(self, format: &Format) -> Option<&'static str> {
        match self {
            Source::Field(name)
            | Source::Element(name, _)
            | Source::Device(name)
            | Source::Rwbs(name) => Some(name),
            Source::Either(a, b) | Source::Errno(a, b) => {
                Some(if format.field(a).is_some() { a } else { b })
            }
            Source::Optional(_) | Source::Nothing => None,
        }
    }
}

/// A [`Source`] resolved against one kernel's format.
#[derive(Clone, Debug)]
enum Extract {
    Zero,
    Number(Field, usize),
    Errno(Field),
    Rwbs(Field),
    Device(Field),
}

#[derive(Clone, Debug)]
enum Rule {
    Event(Kind, Vec<Extract>),
    /// The function tracer: `ip` identifies the function, which determines the kind.
    Function(Field, Symbols),
}

/// Kernel functions by address, each with the kind of event that a call of it is.
#[derive(Clone, Debug, Default)]
pub struct Symbols {
    /// (address, kind) by rising address. The kind is `None` for a function that is not traced.
    entries: Vec<(u64, Option<Kind>)>,
}

impl Symbols {
    /// Parses the text of /proc/kallsyms.
    pub fn parse(kallsyms: &str, kind_of: impl Fn(&str) -> Option<Kind>) -> Symbols {
        let entry = |line: &str| {
            let mut parts = line.split_whitespace();
            let address = u64::from_str_radix(parts.next()?, 16).ok()?;
            let is_code = matches!(parts.next()?, "t" | "T" | "w" | "W");
            (is_code && address != 0).then_some((address, kind_of(parts.next()?)))
        };
        let mut entries: Vec<_> = kallsyms.lines().filter_map(entry).collect();
        entries.sort_unstable_by_key(|&(address, kind)| (address, kind.is_none()));
        entries.dedup_by_key(|&mut (address, _)| address);
        Symbols { entries }
    }

    /// Returns whether none of the wanted functions was found.
    pub fn is_empty(&self) -> bool {
        self.entries.iter().all(|(_, kind)| kind.is_none())
    }

    /// Returns the kind of the function that contains this address. The tracer's call is some bytes
    /// after the function's start.
    fn kind(&self, ip: u64) -> Option<Kind> {
        let after = self.entries.partition_point(|&(address, _)| address <= ip);
        self.entries.get(after.checked_sub(1)?)?.1
    }
}

/// How records are converted to events.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    rules: Vec<Rule>,
    /// Index into `rules` plus one, by `common_type`; 0 if there is no rule.
    index: Vec<u16>,
    /// Offset of `common_pid`.
    pid: usize,
    /// Maximum number of arguments of an event.
    width: usize,
    /// Device numbers to replace: (from, to).
    aliases: Vec<(u64, u64)>,
}

impl Plan {
    /// Adds a rule: records of this format become events of that kind.
    ///
    /// # Errors
    /// The name of the field that this kernel's event lacks.
    pub fn add(&mut self, format: &Format, kind: Kind, args: &[Source]) -> Result<(), String> {
        debug_assert_eq!(args.len(), kind.args().len(), "{}", kind.name());
        let extracts: Result<Vec<Extract>, String> =
            args.iter().map(|&arg| resolve(format, arg)).collect();
        self.insert(format, Rule::Event(kind, extracts?));
        Ok(())
    }

    /// Adds a rule for the function tracer's records.
    ///
    /// # Errors
    /// When the records have no `ip`.
    pub fn add_functions(&mut self, format: &Format, symbols: Symbols) -> Result<(), String> {
        let ip = field(format, "ip")?;
        self.insert(format, Rule::Function(ip, symbols));
        Ok(())
    }

    /// Reports events of the device `from` as events of the device `to`.
    pub fn alias_device(&mut self, from: u64, to: u64) {
        self.aliases.push((from, to));
    }

    fn insert(&mut self, format: &Format, rule: Rule) {
        let args = match &rule {
            Rule::Event(_, args) => args.len(),
            Rule::Function(..) => 0,
        };
        self.width = self.width.max(args);
        let id = usize::from(format.id);
        if self.index.len() <= id {
            self.index.resize(id + 1, 0);
        }
        self.rules.push(rule);
        self.index[id] = u16::try_from(self.rules.len()).unwrap_or(0);
        self.pid = format.field("common_pid").map_or(4, |field| field.offset);
    }

    /// Returns the maximum number of arguments of an event, including [`Kind::Lost`].
    pub fn width(&self) -> usize {
        self.width.max(1)
    }

    /// Converts a record to an event. Returns `None` if no rule applies or a field is missing.
    #[inline]
    pub fn event(&self, cpu: u16, record: &Record) -> Option<Event> {
        let data = record.data;
        let id = u16::from_le_bytes([*data.first()?, *data.get(1)?]);
        let rule = usize::from(*self.index.get(usize::from(id))?);
        let rule = self.rules.get(rule.checked_sub(1)?)?;
        let pid = data.get(self.pid..self.pid + 4)?;
        let tid = u32::from_le_bytes([pid[0], pid[1], pid[2], pid[3]]);
        let mut event = Event {
            time: record.time,
            kind: Kind::Lost,
            cpu,
            tid,
            args: [0; MAX_ARGS],
        };
        match rule {
            Rule::Event(kind, extracts) => {
                event.kind = *kind;
                for (arg, extract) in event.args.iter_mut().zip(extracts) {
                    *arg = extract.get(data, &self.aliases)?;
                }
            }
            Rule::Function(ip, symbols) => {
                event.kind = symbols.kind(ip.number(data, 0)?)?;
            }
        }
        Some(event)
    }
}

fn field(format: &Format, name: &str) -> Result<Field, String> {
    let found = format.field(name).cloned();
    found.ok_or_else(|| format!("this kernel's event {} has no field {name}", format.name))
}

fn resolve(format: &Format, source: Source) -> Result<Extract, String> {
    let number = |name| field(format, name).map(|field| Extract::Number(field, 0));
    Ok(match source {
        Source::Field(name) => number(name)?,
        Source::Either(a, b) => number(a).or_else(|error| number(b).map_err(|_| error))?,
        Source::Optional(name) => number(name).unwrap_or(Extract::Zero),
        Source::Element(name, element) => Extract::Number(field(format, name)?, element),
        Source::Errno(a, b) => {
            let found = field(format, a).or_else(|error| field(format, b).map_err(|_| error));
            Extract::Errno(found?)
        }
        Source::Device(name) => Extract::Device(field(format, name)?),
        Source::Rwbs(name) => Extract::Rwbs(field(format, name)?),
        Source::Nothing => Extract::Zero,
    })
}

impl Extract {
    #[inline]
    fn get(&self, record: &[u8], aliases: &[(u64, u64)]) -> Option<u64> {
        match self {
            Extract::Zero => Some(0),
            Extract::Number(field, element) => field.number(record, *element),
            Extract::Errno(field) => {
                let errno = field.number(record, 0)? as i64;
                Some(errno.unsigned_abs())
            }
            Extract::Rwbs(field) => Some(flags_of(field.text(record)?)),
            Extract::Device(field) => {
                let dev = field.number(record, 0)?;
                let alias = aliases.iter().find(|(from, _)| *from == dev);
                Some(alias.map_or(dev, |&(_, to)| to))
            }
        }
    }
}

/// Returns the [`flags`] for the letters that blk_fill_rwbs() writes
/// (include/trace/events/block.h). An F before the operation requests a flush before it; an F after
/// the operation is FUA. A read has no flag of its own. WRITE_ZEROES has the letter N, for none of
/// the others, as have commands of drivers, which transfer no sectors, and flushes, after an F.
pub fn flags_of(rwbs: &[u8]) -> u64 {
    let (mut bits, mut letters) = (0, rwbs.iter().copied().peekable());
    if letters.peek() == Some(&b'F') {
        bits |= flags::FLUSH;
        letters.next();
    }
    match letters.next() {
        Some(b'W') => bits |= flags::WRITE,
        Some(b'D') => bits |= flags::DISCARD,
        Some(b'N') if bits == 0 => bits |= flags::DISCARD | flags::WRITE,
        // A read, or a flush without data.
        _ => {}
    }
    for letter in letters {
        bits |= match letter {
            b'F' => flags::FUA,
            b'A' => flags::READAHEAD,
            b'S' => flags::SYNC,
            b'M' => flags::METADATA,
            _ => 0,
        };
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    const ISSUE: &str = "name: block_rq_issue
ID: 70
format:
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;
	field:int common_pid;	offset:4;	size:4;	signed:1;
	field:dev_t dev;	offset:8;	size:4;	signed:0;
	field:sector_t sector;	offset:16;	size:8;	signed:0;
	field:unsigned int nr_sector;	offset:24;	size:4;	signed:0;
	field:char rwbs[8];	offset:28;	size:8;	signed:0;
";
    const ARGS: [Source; 4] = [
        Source::Field("dev"),
        Source::Field("sector"),
        Source::Field("nr_sector"),
        Source::Rwbs("rwbs"),
    ];

    fn record() -> Vec<u8> {
        let mut data = vec![0; 36];
        data[0] = 70;
        data[4..8].copy_from_slice(&1234u32.to_le_bytes());
        data[8..12].copy_from_slice(&(8u32 << 20).to_le_bytes());
        data[16..24].copy_from_slice(&4096u64.to_le_bytes());
        data[24..28].copy_from_slice(&8u32.to_le_bytes());
        data[28..31].copy_from_slice(b"WFS");
        data
    }

    #[test]
    fn a_record_becomes_the_event_that_its_format_describes() {
        let mut plan = Plan::default();
        let format = Format::parse(ISSUE).unwrap();
        plan.add(&format, Kind::BlockRqIssue, &ARGS).unwrap();
        let data = record();
        let record = |data| Record { time: 5, data };
        let bits = flags::WRITE | flags::FUA | flags::SYNC;
        let wanted = Event::new(5, Kind::BlockRqIssue, 3, 1234, &[8 << 20, 4096, 8, bits]);
        assert_eq!(plan.event(3, &record(&data)), Some(wanted));
        for cut in 0..data.len() {
            assert_eq!(plan.event(3, &record(&data[..cut])), None);
        }
        let mut other = data.clone();
        other[0] = 71;
        assert_eq!(plan.event(3, &record(&other)), None);
    }

    #[test]
    fn a_field_that_is_missing_is_named() {
        let format = Format::parse(&ISSUE.replace(" sector;", " block;")).unwrap();
        let error = Plan::default().add(&format, Kind::BlockRqIssue, &ARGS);
        assert!(
            error
                .unwrap_err()
                .contains("block_rq_issue has no field sector")
        );
    }

    #[test]
    fn letters_tell_operation_and_flags() {
        use flags::*;
        for (letters, bits) in [
            ("R", 0),
            ("RA", READAHEAD),
            ("RSM", SYNC | METADATA),
            ("WS", WRITE | SYNC),
            ("N", DISCARD | WRITE),
            ("NS", DISCARD | WRITE | SYNC),
            ("FWFS", FLUSH | WRITE | FUA | SYNC),
            ("FF", FLUSH),
            ("FN", FLUSH),
            ("F", FLUSH),
            ("DS", DISCARD | SYNC),
            ("", 0),
        ] {
            assert_eq!(flags_of(letters.as_bytes()), bits, "{letters}");
        }
    }

    #[test]
    fn functions_are_known_by_the_address_that_they_contain() {
        let text = "ffff1000 t before\nffff2000 t vp_notify\t[virtio_pci]\nffff2080 t after\n\
                    ffff2080 d data\n0 t nothing\n";
        let symbols = Symbols::parse(text, |name| match name {
            "vp_notify" => Some(Kind::VpNotify),
            _ => None,
        });
        assert!(!symbols.is_empty());
        assert_eq!(symbols.kind(0xffff_2000), Some(Kind::VpNotify));
        assert_eq!(symbols.kind(0xffff_2004), Some(Kind::VpNotify));
        assert_eq!(symbols.kind(0xffff_2080), None);
        assert_eq!(symbols.kind(0xffff_1004), None);
        assert_eq!(symbols.kind(0), None);
    }
}
