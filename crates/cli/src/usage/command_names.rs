//! Suggests commands for names from other programs.

use clap::Command;

/// Command names of other programs, with Fathom's commands.
static TOP: &[(&str, &[&str])] = &[
    ("stop", &["quit"]),
    ("shutdown", &["quit"]),
    ("kill", &["quit"]),
    ("remove", &["disk remove"]),
    ("delete", &["disk remove"]),
    ("rm", &["disk remove"]),
    ("add", &["disk add"]),
    ("attach", &["disk add", "show"]),
    ("change", &["disk change"]),
    ("status", &["list", "show"]),
    ("ps", &["list"]),
    ("ls", &["list"]),
    ("start", &["serve"]),
    ("run", &["serve"]),
    ("create", &["img create"]),
    ("copy", &["mirror start"]),
    ("migrate", &["mirror start"]),
    ("throttle", &["set", "group"]),
    ("latency", &["stats"]),
    ("version", &["--version"]),
];

/// Subcommand names of other programs, with Fathom's equivalents.
static BELOW: &[(&str, &str)] = &[
    ("delete", "remove"),
    ("rm", "remove"),
    ("del", "remove"),
    ("create", "add"),
    ("new", "add"),
    ("ls", "list"),
    ("info", "show"),
    ("status", "show"),
    ("pause", "freeze"),
    ("resume", "thaw"),
    ("cancel", "stop"),
    ("abort", "stop"),
    ("end", "stop"),
];

/// Returns the commands that the user may mean, such as `fathom quit` for `fathom stop`.
pub fn instead_of(command: &str, name: &str) -> Vec<String> {
    let all = crate::help::command();
    if command == all.get_name() {
        return at_the_top(&all, name);
    }
    let mut words = command.split(' ').skip(1);
    let found = words.try_fold(&all, |one, word| one.find_subcommand(word));
    let means = |(other, own): &(&str, &'static str)| (*other == name).then_some(*own);
    let own = BELOW.iter().find_map(means);
    let own = own.filter(|own| found.is_some_and(|one| one.find_subcommand(own).is_some()));
    own.map(|own| format!("{command} {own}"))
        .into_iter()
        .collect()
}

fn at_the_top(all: &Command, name: &str) -> Vec<String> {
    if let Some((_, own)) = TOP.iter().find(|(other, _)| *other == name) {
        return own.iter().map(|own| format!("fathom {own}")).collect();
    }
    // `fathom freeze` may mean `fathom disk freeze`.
    let visible = all.get_subcommands().filter(|one| !one.is_hide_set());
    let below = visible.filter(|one| {
        let found = one.find_subcommand(name);
        found.is_some_and(|found| !found.is_hide_set())
    });
    below
        .map(|one| format!("fathom {} {name}", one.get_name()))
        .take(2)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggested_commands_exist() {
        let all = crate::help::command();
        for own in TOP.iter().flat_map(|(_, own)| *own) {
            let mut words = own.split(' ').filter(|word| !word.starts_with('-'));
            let found = words.try_fold(&all, |one, word| one.find_subcommand(word));
            assert!(found.is_some(), "{own}");
        }
        for (other, _) in TOP {
            assert!(all.find_subcommand(other).is_none(), "{other}");
        }
    }
}
