//! Resource limits of a tenant, in the syntax of the configuration.

use fathom_units::{Size, parse_size};
use serde::{Deserialize, Deserializer, de};
use std::fmt;
use std::str::FromStr;

/// Minimum memory limit of a tenant, in bytes: its process without disks. A disk needs more.
const LEAST_MEMORY: u64 = 16 << 20;
/// Minimum limit of tasks: the threads of a tenant's process without disks.
const LEAST_TASKS: u32 = 16;

/// Resource limits of one tenant. None: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allowance {
    /// Limit of the memory of the tenant's processes.
    pub memory: Option<Memory>,
    /// Limit of the CPU time of the tenant's processes.
    pub cpu: Option<Cpu>,
    /// Limit of the number of the tenant's processes and threads.
    pub tasks: Option<Tasks>,
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory(pub u64);

/// Percent of the time of one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu(pub u32);

/// A number of processes and threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tasks(pub u32);

/// A limit, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Most<T> {
    /// No limit. In the table of a tenant, `off` overrides the limit for all tenants.
    Off,
    /// Limit with this value.
    At(T),
}

/// A table `[tenant.NAME]`. Absent keys have the values of the table `[tenants]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct AllowanceTable {
    /// Key `memory-max`: a size such as `256M`, or `off`.
    #[serde(default, deserialize_with = "text_or_number")]
    pub memory_max: Option<Most<Memory>>,
    /// Key `cpu-max`: a share of CPU time such as `150%`, where 100% is one CPU, or `off`.
    #[serde(default, deserialize_with = "text_or_number")]
    pub cpu_max: Option<Most<Cpu>>,
    /// Key `tasks-max`: a number of processes and threads, or `off`.
    #[serde(default, deserialize_with = "text_or_number")]
    pub tasks_max: Option<Most<Tasks>>,
}

impl AllowanceTable {
    /// Returns the limits of this tenant. `all`: the limits of all tenants, which apply where this
    /// table has no key.
    pub fn over(&self, all: &AllowanceTable) -> Allowance {
        Allowance {
            memory: at(self.memory_max.or(all.memory_max)),
            cpu: at(self.cpu_max.or(all.cpu_max)),
            tasks: at(self.tasks_max.or(all.tasks_max)),
        }
    }
}

fn at<T>(most: Option<Most<T>>) -> Option<T> {
    match most {
        Some(Most::At(limit)) => Some(limit),
        Some(Most::Off) | None => None,
    }
}

impl<T: FromStr> FromStr for Most<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Most<T>, T::Err> {
        match text {
            "off" => Ok(Most::Off),
            text => text.parse().map(Most::At),
        }
    }
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Memory, String> {
        match parse_size(text)? {
            bytes if bytes >= LEAST_MEMORY => Ok(Memory(bytes)),
            _ => Err(format!(
                "'{text}' is too little memory for a tenant: give at least {}, or \"off\"",
                Size(LEAST_MEMORY)
            )),
        }
    }
}

impl FromStr for Cpu {
    type Err = String;

    fn from_str(text: &str) -> Result<Cpu, String> {
        let percent = text.strip_suffix('%').and_then(|n| n.trim().parse().ok());
        match percent {
            Some(percent @ 1..=1_000_000) => Ok(Cpu(percent)),
            _ => Err(format!(
                "'{text}' is not a share of CPU time such as \"150%\", where 100% is one CPU, or \
                 \"off\""
            )),
        }
    }
}

impl FromStr for Tasks {
    type Err = String;

    fn from_str(text: &str) -> Result<Tasks, String> {
        match text.parse() {
            Ok(tasks) if tasks >= LEAST_TASKS => Ok(Tasks(tasks)),
            _ => Err(format!(
                "'{text}' is not a number of tasks of at least {LEAST_TASKS}, or \"off\""
            )),
        }
    }
}

/// Deserializes a limit from a string or an integer.
///
/// # Errors
/// The value has another type, or is no valid limit.
pub fn text_or_number<'de, T: FromStr<Err = String>, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<Most<T>>, D::Error> {
    struct Either;
    impl de::Visitor<'_> for Either {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text or a number")
        }

        fn visit_i64<E>(self, number: i64) -> Result<String, E> {
            Ok(number.to_string())
        }

        fn visit_u64<E>(self, number: u64) -> Result<String, E> {
            Ok(number.to_string())
        }

        fn visit_str<E>(self, text: &str) -> Result<String, E> {
            Ok(text.to_owned())
        }
    }
    let text = from.deserialize_any(Either)?;
    text.parse().map(Some).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> AllowanceTable {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn a_tenants_own_limits_go_before_those_of_all() {
        let all = table("memory-max = '1G'\ncpu-max = '150%'\ntasks-max = 100");
        let own = table("memory-max = 67108864\ncpu-max = 'off'");
        assert_eq!(
            own.over(&all),
            Allowance {
                memory: Some(Memory(64 << 20)),
                cpu: None,
                tasks: Some(Tasks(100)),
            }
        );
        assert_eq!(AllowanceTable::default().over(&all).cpu, Some(Cpu(150)));
        let none = AllowanceTable::default();
        assert_eq!(none.over(&none), Allowance::default());
    }

    #[test]
    fn what_is_no_limit_is_refused() {
        for (text, wanted) in [
            ("memory-max = '1M'", "too little"),
            ("memory-max = 0", "too little"),
            ("memory-max = -1", "size"),
            ("memory-max = 'much'", "size"),
            ("memory-max = true", "a text or a number"),
            ("cpu-max = 2", "150%"),
            ("cpu-max = '0%'", "150%"),
            ("cpu-max = '1.5%'", "150%"),
            ("cpu-max = '9999999%'", "150%"),
            ("tasks-max = 1", "at least 16"),
            ("tasks-max = 'few'", "at least 16"),
            ("memory = '1G'", "unknown field"),
        ] {
            let error = toml::from_str::<AllowanceTable>(text).unwrap_err();
            assert!(error.to_string().contains(wanted), "{text}: {error}");
        }
    }
}
