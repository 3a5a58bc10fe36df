//! The groups of commands in `fathom --help`.

use clap::Command;

/// A heading and the commands below it.
pub type Group = (&'static str, &'static [&'static str]);

/// Every visible command is in one group.
pub static GROUPS: &[Group] = &[
    (
        "Serve and manage",
        &[
            "serve", "disk", "list", "show", "set", "group", "resize", "quit", "upgrade", "filters",
        ],
    ),
    ("Protect", &["backup", "bitmap", "snapshot"]),
    ("Change", &["mirror", "commit", "stream", "jobs"]),
    (
        "Watch",
        &[
            "top",
            "advise",
            "stats",
            "slow",
            "trace",
            "breakdown",
            "guest",
        ],
    ),
    ("Measure", &["bench", "lab", "report"]),
    ("Images", &["img", "base"]),
    ("Many hosts", &["fleet"]),
    ("Other", &["man", "completions", HELP]),
];

/// The `help` command, which clap adds.
const HELP: &str = "help";
const ABOUT_HELP: &str = "Print the help of a command";

/// Returns the group of a command.
pub fn of(name: &str) -> Option<&'static Group> {
    GROUPS.iter().find(|(_, commands)| commands.contains(&name))
}

/// Lists the commands of the program by groups instead of in one list.
pub fn with_groups(command: Command) -> Command {
    let header = *command.get_styles().get_header();
    let literal = *command.get_styles().get_literal();
    let names = GROUPS.iter().flat_map(|(_, commands)| *commands);
    let width = names.map(|name| name.len()).max().unwrap_or_default();
    let mut list = String::new();
    for (heading, names) in GROUPS {
        list.push_str(&format!("{header}{heading}:{header:#}\n"));
        for name in *names {
            let about = about(&command, name);
            list.push_str(&format!("  {literal}{name:<width$}{literal:#}  {about}\n"));
        }
        list.push('\n');
    }
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}\
         {header}Options:{header:#}\n{{options}}{{after-help}}"
    ))
}

/// Returns the first line of a command's help.
fn about(command: &Command, name: &str) -> String {
    let found = command.find_subcommand(name);
    match found.and_then(Command::get_about) {
        Some(about) => about.to_string(),
        None if name == HELP => ABOUT_HELP.to_owned(),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::CommandFactory as _;
    use std::collections::BTreeMap;

    #[test]
    fn every_visible_command_is_in_one_group() {
        let mut grouped = BTreeMap::<&str, usize>::new();
        for name in GROUPS.iter().flat_map(|(_, commands)| *commands) {
            *grouped.entry(name).or_default() += 1;
        }
        assert_eq!(grouped.remove(HELP), Some(1));
        let command = Cli::command();
        let visible = command.get_subcommands().filter(|one| !one.is_hide_set());
        let visible: BTreeMap<_, _> = visible.map(|one| (one.get_name(), 1)).collect();
        assert_eq!(grouped, visible);
    }

    #[test]
    fn every_command_is_described_in_one_line() {
        let command = Cli::command();
        for (_, names) in GROUPS {
            for name in *names {
                let about = about(&command, name);
                assert!(!about.is_empty(), "{name} has no description");
                assert!(about.chars().count() <= 60, "{name}: {about}");
            }
        }
    }
}
