//! Throttle groups: disks that share limits, which are changed for all of them at once.
//!
//! A group exists while a disk has a filter that names the group, and has no state besides these
//! filters.

use super::Controller;
use fathom_control::Request::SetFilter;
use fathom_control::RequestError;
use fathom_requests::{Answer, Responder, Shown, ThrottleGroup, ThrottleGroups};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const THROTTLE: &str = "throttle";
const GROUP: &str = "group";

/// A change of a group's options. An empty value is the option's default.
#[derive(Clone)]
struct Change {
    options: BTreeMap<String, String>,
    /// The change is not stored.
    until_restart: bool,
}

/// A filter of a disk that is in a group.
struct Member {
    disk: String,
    tenant: Option<String>,
    /// Name of the filter, with its number.
    filter: String,
    group: String,
    options: BTreeMap<String, String>,
}

impl Controller {
    /// Lists all groups.
    pub(super) fn list_groups(&mut self, responder: Responder) {
        self.list_shown(|controller, disks| {
            responder(Ok(groups(controller.members(&disks)).into()));
        });
    }

    /// Changes the limits of all groups with this name: each tenant may have one. Changes each
    /// disk, so that the files of persistent disks have the new limits.
    pub(super) fn set_group(
        &mut self,
        name: String,
        options: BTreeMap<String, String>,
        until_restart: bool,
        responder: Responder,
    ) {
        let change = Change {
            options,
            until_restart,
        };
        self.list_shown(move |controller, disks| {
            let all = controller.members(&disks).into_iter();
            let (members, others): (Vec<_>, _) = all.partition(|one| one.group == name);
            match members.is_empty() {
                true => responder(Err(unknown(&name, others))),
                false => controller.set_next(members.into(), Vec::new(), name, change, responder),
            }
        });
    }

    /// Changes the next disk of a group, after those that are `done`, and replies with the group
    /// after the last disk. The first error ends the change. Options that are invalid fail at the
    /// first disk, so that nothing has changed then.
    fn set_next(
        &mut self,
        mut left: VecDeque<Member>,
        mut done: Vec<String>,
        group: String,
        change: Change,
        responder: Responder,
    ) {
        let Some(Member { disk, filter, .. }) = left.pop_front() else {
            return self.list_shown(move |controller, disks| {
                let members = controller.members(&disks).into_iter();
                let members = members.filter(|member| member.group == group);
                responder(Ok(groups(members).into()));
            });
        };
        let Change {
            options,
            until_restart,
        } = change.clone();
        let name = disk.clone();
        let next = self.later(
            move |controller: &mut Controller, answer: Answer| match answer {
                Ok(_) => {
                    done.push(disk);
                    controller.set_next(left, done, group, change, responder);
                }
                Err(RequestError { kind, text }) => {
                    responder(Err(kind.because(match done.is_empty() {
                        true => format!("disk '{disk}': {text}"),
                        false => format!(
                            "disk '{disk}': {text}; the new limits are already in force for {}",
                            done.join(", ")
                        ),
                    })))
                }
            },
        );
        let change = SetFilter {
            filter,
            options,
            until_restart,
        };
        self.change(name, change, next);
    }

    /// The filters that are in groups.
    fn members(&self, disks: &[Shown]) -> Vec<Member> {
        disks
            .iter()
            .flat_map(|disk| self.members_of(disk))
            .collect()
    }

    fn members_of(&self, disk: &Shown) -> Vec<Member> {
        let name = &disk.options.name;
        let tenant = self.settings.tenants.0.then(|| {
            let tenant = disk.options.tenant.as_ref();
            tenant.unwrap_or(name).clone()
        });
        let filters = disk.state.filters.iter();
        let throttles = filters.filter(|filter| filter.name == THROTTLE).cloned();
        let members = throttles.enumerate().filter_map(|(index, mut throttle)| {
            Some(Member {
                group: throttle.options.remove(GROUP)?,
                disk: name.clone(),
                tenant: tenant.clone(),
                filter: format!("{THROTTLE}#{}", index + 1),
                options: throttle.options,
            })
        });
        members.collect()
    }
}

/// The groups of these filters, by name and tenant.
fn groups(members: impl IntoIterator<Item = Member>) -> ThrottleGroups {
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
    ThrottleGroups {
        groups: groups.into_values().collect(),
    }
}

fn unknown(name: &str, others: Vec<Member>) -> RequestError {
    let names: BTreeSet<_> = others.into_iter().map(|one| one.group).collect();
    let names: Vec<_> = names.into_iter().collect();
    fathom_control::unknown("throttle group", name, &names)
}
