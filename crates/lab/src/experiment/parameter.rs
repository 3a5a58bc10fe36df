//! Parameters of experiments: types, defaults and ranges. Help, checks and plans are made from one
//! description.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use fathom_units::{parse_duration, parse_seconds, parse_size, short_duration, short_size};

use crate::error::{Error, Result};

/// A parameter of an experiment.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Name, as in `--NAME VALUE`.
    pub name: &'static str,
    /// Summary: one line, without a full stop.
    pub about: &'static str,
    /// Kind of the accepted values.
    pub kind: Kind,
    /// Default value, or several values separated by commas. If empty, the experiment chooses,
    /// depending on the machine.
    pub default: &'static str,
    /// Whether few users need the parameter.
    pub rare: bool,
}

/// The values that a parameter accepts.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Words parsed by a type of their own: `form` describes them, and `check` parses one.
    Word {
        /// Description of the accepted words for users, such as `fathom, qemu`.
        form: &'static str,
        /// Function that parses a word; the error is one line for the user.
        check: fn(&str) -> std::result::Result<(), String>,
    },
    /// A whole number within a range.
    Count {
        /// Smallest accepted number.
        least: u64,
        /// Largest accepted number.
        most: u64,
    },
    /// A number of bytes.
    Size {
        /// Smallest accepted size in bytes.
        least: u64,
        /// Largest accepted size in bytes.
        most: u64,
    },
    /// A duration within a range.
    Time {
        /// Shortest accepted duration.
        least: Duration,
        /// Longest accepted duration.
        most: Duration,
    },
    /// A switch: `on` or `off`.
    Switch,
    /// Any text, unchanged, for example a path.
    Text,
    /// Any number of texts, all of which apply to every cell; never an axis.
    List,
}

/// Separator of a list's texts within one value.
const LIST: char = '\n';

impl Kind {
    /// Returns the kind of words that are parsed as a `T`.
    pub const fn of<T: FromStr<Err = String>>(form: &'static str) -> Kind {
        fn check<T: FromStr<Err = String>>(text: &str) -> std::result::Result<(), String> {
            text.parse::<T>().map(drop)
        }
        Kind::Word {
            form,
            check: check::<T>,
        }
    }

    /// Describes the accepted values for users: `fathom, qemu`, `1 to 1024`, `4k to 64M`.
    pub fn range(&self) -> String {
        match self {
            Kind::Word { form, .. } => (*form).to_owned(),
            Kind::Count { least, most } => format!("{least} to {most}"),
            Kind::Size { least, most } => {
                format!("{} to {}", short_size(*least), short_size(*most))
            }
            Kind::Time { least, most } => {
                format!("{} to {}", short_duration(*least), short_duration(*most))
            }
            Kind::Switch => "on, off".to_owned(),
            Kind::Text => "text".to_owned(),
            Kind::List => "text; repeatable".to_owned(),
        }
    }

    /// Returns the canonical spelling of a value.
    fn canonical(&self, text: &str) -> std::result::Result<String, String> {
        let within = |is_within: bool, value: String| match is_within {
            true => Ok(value),
            false => Err(format!("'{text}' is not within {}", self.range())),
        };
        match self {
            Kind::Word { check, .. } => check(text).map(|()| text.to_owned()),
            Kind::Count { least, most } => {
                let number: u64 = text
                    .parse()
                    .map_err(|_| format!("'{text}' is not a whole number"))?;
                within((*least..=*most).contains(&number), number.to_string())
            }
            Kind::Size { least, most } => {
                let size = parse_size(text)?;
                within((*least..=*most).contains(&size), short_size(size))
            }
            Kind::Time { least, most } => {
                let time = parse_seconds(text)?;
                within((*least..=*most).contains(&time), short_duration(time))
            }
            Kind::Switch => match text {
                "on" | "yes" | "true" => Ok("on".into()),
                "off" | "no" | "false" => Ok("off".into()),
                _ => Err(format!("'{text}' is neither on nor off")),
            },
            Kind::Text | Kind::List => Ok(text.to_owned()),
        }
    }
}

impl Parameter {
    /// Creates a parameter that is shown to all users.
    pub const fn new(
        name: &'static str,
        about: &'static str,
        kind: Kind,
        default: &'static str,
    ) -> Parameter {
        Parameter {
            name,
            about,
            kind,
            default,
            rare: false,
        }
    }

    /// Marks the parameter as needed by few users.
    #[must_use]
    pub const fn rarely(mut self) -> Parameter {
        self.rare = true;
        self
    }

    /// Returns the values in a user's texts. A text has one value, or several separated by commas.
    /// The texts of a list make one value together.
    ///
    /// # Errors
    /// One line that names the parameter and says what it accepts.
    pub fn values(&self, texts: &[String]) -> Result<Vec<String>> {
        if matches!(self.kind, Kind::List) {
            return Ok(vec![texts.join(&LIST.to_string())]);
        }
        let values = texts.iter().flat_map(|text| self.split(text));
        let values = values.map(|text| self.value(&text));
        let values = values.collect::<Result<Vec<String>>>()?;
        match (1..values.len()).find(|&i| values[..i].contains(&values[i])) {
            Some(i) => Err(Error::Protocol(format!(
                "--{}: '{}' twice",
                self.name, values[i]
            ))),
            None => Ok(values),
        }
    }

    /// Returns the values that apply unless the user sets any; several values make an axis.
    pub fn defaults(&self) -> Vec<String> {
        self.split(self.default)
    }

    /// `a,b` are two values, and `a\,b` is one. In free text, commas have no meaning.
    fn split(&self, text: &str) -> Vec<String> {
        // Command-line arguments never contain NUL.
        const COMMA: &str = "\0";
        match self.kind {
            Kind::Text | Kind::List => vec![text.to_owned()],
            _ => {
                let text = text.replace("\\,", COMMA);
                let values = text.split(',');
                values.map(|value| value.replace(COMMA, ",")).collect()
            }
        }
    }

    /// Returns the canonical spelling of a value.
    ///
    /// # Errors
    /// One line that names the parameter and says what it accepts.
    pub fn value(&self, text: &str) -> Result<String> {
        if text.is_empty() && self.default.is_empty() {
            return Ok(String::new());
        }
        let named = |error| Error::Protocol(format!("--{}: {error}", self.name));
        self.kind.canonical(text).map_err(named)
    }
}

/// A cell's value of every parameter, in canonical spelling.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Settings(pub BTreeMap<String, String>);

impl Settings {
    /// Returns the default of each parameter; if there are several, the first.
    pub fn defaults(parameters: &[Parameter]) -> Settings {
        let first = |one: &Parameter| one.defaults().into_iter().next();
        let pairs = parameters.iter();
        let pairs = pairs.map(|one| (one.name.to_owned(), first(one).unwrap_or_default()));
        Settings(pairs.collect())
    }

    /// Returns a value's text. An empty text leaves the choice to the experiment.
    pub fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    /// Replaces a value.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl ToString) -> Settings {
        self.0.insert(name.to_owned(), value.to_string());
        self
    }

    /// Parses a value as a `T`.
    ///
    /// # Errors
    /// If the value is not a `T`, for example in a run directory written by another program.
    pub fn word<T: FromStr<Err = String>>(&self, name: &str) -> Result<T> {
        let text = self.text(name);
        text.parse()
            .map_err(|error| Error::Protocol(format!("--{name}: {error}")))
    }

    /// Like [`word`](Self::word); `None` if the experiment chooses the value.
    ///
    /// # Errors
    /// Like [`word`](Self::word).
    pub fn chosen<T: FromStr<Err = String>>(&self, name: &str) -> Result<Option<T>> {
        match self.text(name) {
            "" => Ok(None),
            _ => self.word(name).map(Some),
        }
    }

    /// Returns a number, or `None` if it has no value.
    ///
    /// # Errors
    /// Like [`word`](Self::word).
    pub fn count<T: FromStr>(&self, name: &str) -> Result<Option<T>> {
        let bad = |text: &str| format!("'{text}' is not such a number");
        self.parse(name, |text| text.parse().map_err(|_| bad(text)))
    }

    /// Returns a number of bytes, or `None` if it has no value.
    ///
    /// # Errors
    /// Like [`word`](Self::word).
    pub fn size(&self, name: &str) -> Result<Option<u64>> {
        self.parse(name, parse_size)
    }

    /// Returns a time, or `None` if it has no value.
    ///
    /// # Errors
    /// Like [`word`](Self::word).
    pub fn time(&self, name: &str) -> Result<Option<Duration>> {
        self.parse(name, parse_duration)
    }

    /// Whether a switch is on.
    pub fn is_on(&self, name: &str) -> bool {
        self.text(name) == "on"
    }

    /// Returns the texts of a list.
    pub fn list(&self, name: &str) -> Vec<String> {
        let text = self.text(name);
        let texts = text.split(LIST).filter(|text| !text.is_empty());
        texts.map(str::to_owned).collect()
    }

    /// Returns a value that must exist.
    ///
    /// # Errors
    /// If the value is `None`.
    pub fn needed<T>(name: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| Error::Protocol(format!("--{name} has no value")))
    }

    fn parse<T>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> std::result::Result<T, String>,
    ) -> Result<Option<T>> {
        match self.text(name) {
            "" => Ok(None),
            text => parse(text)
                .map(Some)
                .map_err(|error| Error::Protocol(format!("--{name}: {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Rw;

    const SIZE: Kind = Kind::Size {
        least: 512,
        most: 1 << 20,
    };

    fn values(kind: Kind, default: &'static str, texts: &[&str]) -> Result<Vec<String>> {
        let texts: Vec<String> = texts.iter().map(|&text| text.to_owned()).collect();
        Parameter::new("p", "a parameter", kind, default).values(&texts)
    }

    #[test]
    fn values_have_one_spelling() {
        assert_eq!(
            values(SIZE, "4k", &["4096,8K", "1M"]).unwrap(),
            ["4k", "8k", "1M"]
        );
        let time = Kind::Time {
            least: Duration::ZERO,
            most: Duration::from_secs(9),
        };
        assert_eq!(
            values(time, "1s", &["5", "1500ms"]).unwrap(),
            ["5s", "1500ms"]
        );
        assert_eq!(values(Kind::Switch, "off", &["yes"]).unwrap(), ["on"]);
        let count = Kind::Count { least: 1, most: 9 };
        assert_eq!(values(count, "1", &["07"]).unwrap(), ["7"]);
        assert_eq!(values(Kind::List, "", &["a,b", "c"]).unwrap(), ["a,b\nc"]);
        assert_eq!(values(SIZE, "", &[""]).unwrap(), [""]);
        let rw = Kind::of::<Rw>("read, write");
        let parameter = Parameter::new("rw", "what is done", rw, "read,write");
        assert_eq!(parameter.defaults(), ["read", "write"]);
        assert_eq!(Settings::defaults(&[parameter]).text("rw"), "read");
        let any = Kind::Word {
            form: "PATH",
            check: |_| Ok(()),
        };
        assert_eq!(values(any, "/", &["/a\\,b,/c"]).unwrap(), ["/a,b", "/c"]);
    }

    #[test]
    fn what_is_no_value_is_told_with_its_parameter() {
        let said = |kind, texts: &[&str]| values(kind, "x", texts).unwrap_err().to_string();
        assert_eq!(said(SIZE, &["2M"]), "--p: '2M' is not within 512 to 1M");
        assert_eq!(said(SIZE, &["4k", "4096"]), "--p: '4k' twice");
        assert_eq!(
            said(Kind::Switch, &["maybe"]),
            "--p: 'maybe' is neither on nor off"
        );
        assert!(said(Kind::of::<Rw>("read, write"), &["reed"]).contains("'reed' is none of"));
        assert!(said(SIZE, &[""]).contains("is not a size"));
    }

    #[test]
    fn settings_give_values_back() {
        let settings = Settings::default()
            .with("bs", "64k")
            .with("time", "5s")
            .with("n", 7)
            .with("filter", "a,b\nc")
            .with("rw", "randread");
        assert_eq!(settings.size("bs").unwrap(), Some(64 << 10));
        assert_eq!(settings.time("time").unwrap(), Some(Duration::from_secs(5)));
        assert_eq!(settings.count::<u16>("n").unwrap(), Some(7));
        assert_eq!(settings.list("filter"), ["a,b", "c"]);
        assert_eq!(settings.word::<Rw>("rw").unwrap(), Rw::RandRead);
        assert_eq!(settings.size("none").unwrap(), None);
        assert!(settings.count::<u16>("rw").is_err() && settings.word::<Rw>("bs").is_err());
    }
}
