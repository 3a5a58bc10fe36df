//! Parses `NAME:KEY=VALUE,...` from a command line.

use std::fmt;
use std::str::FromStr;

/// A requested filter: name and options, neither validated yet. A comma within a value is doubled,
/// as in QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Name of the filter's kind.
    pub name: String,
    /// Names and values of the options, in the order of the text.
    pub options: Vec<(String, String)>,
}

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> Result<Spec, String> {
        let (name, options) = text.split_once(':').unwrap_or((text, ""));
        Ok(Spec {
            name: name.to_owned(),
            options: parse_options(options)?,
        })
    }
}

/// Parses `KEY=VALUE,...`; an empty text has no options.
fn parse_options(text: &str) -> Result<Vec<(String, String)>, String> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    split(text)
        .iter()
        .map(|option| parse_option(option))
        .collect()
}

/// Parses `KEY=VALUE`.
pub(crate) fn parse_option(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("'{text}' is not an option such as KEY=VALUE")),
    }
}

/// Splits at single commas, and replaces doubled commas with single ones.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        let last = parts.last_mut().expect("one at least");
        if c != ',' {
            last.push(c);
        } else if rest.next_if_eq(&',').is_some() {
            last.push(',');
        } else {
            parts.push(String::new());
        }
    }
    parts
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        for (n, (key, value)) in self.options.iter().enumerate() {
            let separator = if n == 0 { ':' } else { ',' };
            write!(f, "{separator}{key}={}", value.replace(',', ",,"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec(name: &str, options: &[(&str, &str)]) -> Spec {
        let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        Spec {
            name: name.to_owned(),
            options: options.iter().map(own).collect(),
        }
    }

    #[test]
    fn a_filter_is_a_name_and_options() {
        let parse = |text: &str| text.parse::<Spec>();
        assert_eq!(parse("readonly"), Ok(spec("readonly", &[])));
        let delay = spec("delay", &[("read", "1ms"), ("write", "")]);
        assert_eq!(parse("delay:read=1ms,write="), Ok(delay));
        let log = spec("log", &[("file", "a,b=c:d")]);
        assert_eq!(parse("log:file=a,,b=c:d"), Ok(log));
        for bad in ["delay:read", "delay:=1ms", "delay:read=1ms,", "delay:,"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(
            name in "[a-z]{0,8}",
            options in prop::collection::vec(("[a-z-]{1,8}", "[a-c,=:]{0,8}"), 0..4),
        ) {
            let spec = Spec { name, options };
            // A value may end with a comma before the separator: `a=,,,b=`.
            prop_assert_eq!(spec.to_string().parse::<Spec>(), Ok(spec));
        }

        #[test]
        fn nothing_makes_it_panic(text in "\\PC*") {
            let _ = text.parse::<Spec>();
        }
    }
}
