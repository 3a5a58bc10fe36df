//! Throttle groups: disks that share limits, which are changed for all of them at once.
//!
//! A group is what its disks' filters say, and nothing besides: it comes with its first disk and goes
//! with its last.

use super::Controller;
use crate::answer::{Answer, Asker};
use crate::command::Command;
use fathom_control::RequestError;
use fathom_stack::FilterInfo;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use utoipa::ToSchema;

const THROTTLE: &str = "throttle";
const GROUP: &str = "group";

/// A throttle group: disks that share limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ThrottleGroup {
    /// Name of the group.
    pub name: String,
    /// Tenant of the disks: each tenant has groups of its own. Absent if the server has no tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Names of the disks.
    pub disks: BTreeSet<String>,
    /// Limits that are not at their defaults, by option of the filter `throttle`.
    pub options: BTreeMap<String, String>,
}

/// What becomes of a group's options; an empty value is the option's default.
#[derive(Clone)]
struct Change {
    options: BTreeMap<String, String>,
    /// Not to be kept: as before when the server starts again.
    temporary: bool,
}

/// A filter of a disk that is in a group.
struct Member {
    disk: String,
    tenant: Option<String>,
    /// What it is called there.
    filter: String,
    group: String,
    options: BTreeMap<String, String>,
}

impl Controller {
    /// All groups.
    pub(super) fn list_groups(&mut self, asker: Asker) {
        self.then(None, Command::List, |controller, answer| {
            asker(answer.map(|list| tell(controller.members(&list))));
        });
    }

    /// Change the limits of a group, of each tenant that has one of that name. Each disk is told, so that
    /// each that is kept has it in its file.
    pub(super) fn set_group(
        &mut self,
        name: String,
        options: BTreeMap<String, String>,
        temporary: bool,
        asker: Asker,
    ) {
        let change = Change { options, temporary };
        self.then(
            None,
            Command::List,
            move |controller, answer| match answer {
                Err(refusal) => asker(Err(refusal)),
                Ok(list) => {
                    let all = controller.members(&list).into_iter();
                    let (members, others): (Vec<_>, _) = all.partition(|one| one.group == name);
                    match members.is_empty() {
                        true => asker(Err(unknown(&name, others))),
                        false => {
                            controller.set_next(members.into(), Vec::new(), name, change, asker)
                        }
                    }
                }
            },
        );
    }

    /// The next disk of a group, after those that are `done`; when there is none, the group as it is now.
    /// The first that refuses ends it: nothing has changed then, if the options make no sense.
    fn set_next(
        &mut self,
        mut left: VecDeque<Member>,
        mut done: Vec<String>,
        group: String,
        change: Change,
        asker: Asker,
    ) {
        let Some(Member { disk, filter, .. }) = left.pop_front() else {
            return self.then(None, Command::List, move |controller, answer| {
                let of_it = |list| {
                    let members = controller.members(&list).into_iter();
                    tell(members.filter(|member| member.group == group))
                };
                asker(answer.map(of_it));
            });
        };
        let Change { options, temporary } = change.clone();
        let name = disk.clone();
        let next = self.later(
            move |controller: &mut Controller, answer: Answer| match answer {
                Ok(_) => {
                    done.push(disk);
                    controller.set_next(left, done, group, change, asker);
                }
                Err(RequestError { kind, text }) => {
                    asker(Err(kind.because(match done.is_empty() {
                        true => format!("disk '{disk}': {text}"),
                        false => format!(
                            "disk '{disk}': {text}; the new limits are already in force for {}",
                            done.join(", ")
                        ),
                    })))
                }
            },
        );
        self.set_filter(name, filter, options, temporary, next);
    }

    /// The filters that are in groups, of a list of disks.
    fn members(&self, list: &Value) -> Vec<Member> {
        let disks = list["disks"].as_array().into_iter().flatten();
        disks.flat_map(|disk| self.members_of(disk)).collect()
    }

    fn members_of(&self, disk: &Value) -> Vec<Member> {
        let name = disk["state"]["name"].as_str().unwrap_or_default();
        let tenant = match (self.settings.tenants.0, disk["options"]["tenant"].as_str()) {
            (true, tenant) => Some(tenant.unwrap_or(name).to_owned()),
            (false, _) => None,
        };
        let filters = disk["state"]["filters"].as_array().into_iter().flatten();
        let filters = filters.filter_map(|filter| FilterInfo::deserialize(filter).ok());
        let throttles = filters.filter(|filter| filter.name == THROTTLE);
        let members = throttles.enumerate().filter_map(|(index, mut throttle)| {
            Some(Member {
                group: throttle.options.remove(GROUP)?,
                disk: name.to_owned(),
                tenant: tenant.clone(),
                filter: format!("{THROTTLE}#{}", index + 1),
                options: throttle.options,
            })
        });
        members.collect()
    }
}

/// `{"groups": [a ThrottleGroup, ...]}`, by name and tenant.
fn tell(members: impl IntoIterator<Item = Member>) -> Value {
    let mut groups = BTreeMap::<_, ThrottleGroup>::new();
    for Member {
        disk,
        tenant,
        group,
        options,
        ..
    } in members
    {
        let known = groups.entry((group.clone(), tenant.clone()));
        let known = known.or_insert(ThrottleGroup {
            name: group,
            tenant,
            disks: BTreeSet::new(),
            options,
        });
        known.disks.insert(disk);
    }
    let groups: Vec<_> = groups.into_values().collect();
    json!({ "groups": groups })
}

fn unknown(name: &str, others: Vec<Member>) -> RequestError {
    let names: BTreeSet<_> = others.into_iter().map(|one| one.group).collect();
    let names: Vec<_> = names.into_iter().collect();
    fathom_control::unknown("throttle group", name, &names)
}
