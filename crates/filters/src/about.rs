//! Descriptions of filters for users.

use fathom_units::unknown_name;

/// A filter as `fathom filters` lists it.
#[derive(Debug, PartialEq, Eq)]
pub struct About {
    /// Name of the filter, by which users select it.
    pub name: &'static str,
    /// Description of the filter, one line.
    pub what: &'static str,
    /// Options of the filter, in the order of the help.
    pub options: &'static [Opt],
}

/// An option of a filter.
#[derive(Debug, PartialEq, Eq)]
pub struct Opt {
    /// Name of the option.
    pub name: &'static str,
    /// Syntax of a value, with its unit.
    pub value: &'static str,
    /// Default value. None: the option is an action, available only in `fathom set`.
    pub default: Option<&'static str>,
    /// Description of the option, one line.
    pub what: &'static str,
}

impl Opt {
    pub(crate) const fn new(
        name: &'static str,
        value: &'static str,
        default: &'static str,
        what: &'static str,
    ) -> Opt {
        Opt {
            name,
            value,
            default: Some(default),
            what,
        }
    }

    pub(crate) const fn action(name: &'static str, value: &'static str, what: &'static str) -> Opt {
        Opt {
            name,
            value,
            default: None,
            what,
        }
    }
}

impl About {
    pub(crate) fn option(&self, name: &str) -> Result<&'static Opt, String> {
        let known = self.options.iter().find(|option| option.name == name);
        known.ok_or_else(|| match self.options {
            [] => format!("filter '{}' has no options", self.name),
            _ => {
                let names: Vec<_> = self.options.iter().map(|option| option.name).collect();
                let list = format!("'fathom filters {}' lists all", self.name);
                unknown_name(
                    &format!("option of filter '{}':", self.name),
                    name,
                    &names,
                    &list,
                )
            }
        })
    }
}
