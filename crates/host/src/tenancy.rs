//! Users and resource limits of tenants, in the syntax of the configuration.

use crate::allowance::{Allowance, AllowanceTable, Cpu, Memory, Most, Tasks, text_or_number};
use crate::users::Users;
use fathom_spec::text;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::fmt;

/// The table `[tenants]`, which applies to all tenants of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Tenancy {
    /// None: the processes of tenants run as the supervisor's user.
    #[serde(default, with = "text::optional")]
    pub users: Option<Users>,
    #[serde(default, deserialize_with = "text_or_number")]
    memory_max: Option<Most<Memory>>,
    #[serde(default, deserialize_with = "text_or_number")]
    cpu_max: Option<Most<Cpu>>,
    #[serde(default, deserialize_with = "text_or_number")]
    tasks_max: Option<Most<Tasks>>,
    /// The tables of single tenants, by name.
    #[serde(skip)]
    pub each: BTreeMap<String, AllowanceTable>,
}

impl Tenancy {
    /// Rejects users that this process cannot give to tenants.
    pub fn check(&self) -> Result<(), String> {
        self.users.as_ref().map_or(Ok(()), Users::check)
    }

    fn of_all(&self) -> AllowanceTable {
        AllowanceTable {
            memory_max: self.memory_max,
            cpu_max: self.cpu_max,
            tasks_max: self.tasks_max,
        }
    }

    /// Returns the limits of this tenant.
    pub fn allowance_of(&self, tenant: &str) -> Allowance {
        let own = self.each.get(tenant).cloned().unwrap_or_default();
        own.over(&self.of_all())
    }

    /// Returns the limits of each tenant with a table of its own, and of a tenant without one.
    pub fn allowances(&self) -> Vec<Allowance> {
        let all = self.of_all();
        let each = self.each.values().map(|own| own.over(&all));
        each.chain([AllowanceTable::default().over(&all)]).collect()
    }
}

/// Reads `tenants = true`, or a table `[tenants]`. None: one process serves all disks.
pub fn tenants<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Tenancy>, D::Error> {
    struct Either;
    impl<'de> Visitor<'de> for Either {
        type Value = Option<Tenancy>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("true, false or a table [tenants]")
        }

        fn visit_bool<E>(self, is_on: bool) -> Result<Option<Tenancy>, E> {
            Ok(is_on.then(Tenancy::default))
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Option<Tenancy>, A::Error> {
            Tenancy::deserialize(MapAccessDeserializer::new(map)).map(Some)
        }
    }
    from.deserialize_any(Either)
}
