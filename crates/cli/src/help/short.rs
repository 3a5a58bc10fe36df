//! The options that `-h` shows of commands with many options. `--help` shows all of them.

use clap::Command;

/// Commands with the ids of the arguments that most users need.
static SHOWN: &[(&str, &[&str])] = &[
    (
        "fathom serve",
        &[
            "disk",
            "format",
            "readonly",
            "vhost_user",
            "nbd",
            "export_name",
            "iothreads",
            "cache",
            "filters",
            "config",
            "log",
        ],
    ),
    (
        "fathom disk add",
        &[
            "name",
            "disk",
            "format",
            "readonly",
            "vhost_user",
            "nbd",
            "export_name",
            "iothreads",
            "cache",
            "filters",
            "server",
            "temporary",
            "json",
        ],
    ),
    (
        "fathom backup full",
        &[
            "disk_or_server",
            "server",
            "file",
            "target_format",
            "compress",
            "archive",
            "bitmap",
            "with",
            "guest_agent",
            "verify",
            "progress",
            "json",
        ],
    ),
    (
        "fathom backup incremental",
        &[
            "disk_or_server",
            "server",
            "file",
            "base",
            "bitmap",
            "compress",
            "guest_agent",
            "verify",
            "progress",
            "json",
        ],
    ),
    (
        "fathom mirror start",
        &[
            "disk_or_server",
            "server",
            "to",
            "target_format",
            "options",
            "speed",
            "active",
            "wait",
            "progress",
            "json",
        ],
    ),
    (
        "fathom img convert",
        &[
            "files",
            "source_format",
            "source_snapshot",
            "target_format",
            "options",
            "compress",
            "backing",
            "backing_format",
            "bitmaps",
            "no_create",
            "force_share",
            "keys",
            "progress",
            "quiet",
            "json",
        ],
    ),
    (
        "fathom bench",
        &[
            "path",
            "vhost_user",
            "nbd",
            "info",
            "rw",
            "bs",
            "iodepth",
            "queues",
            "runtime",
            "size",
            "verify",
            "overwrite",
            "workload",
            "output",
            "json",
            "client",
        ],
    ),
];

/// Hides the arguments from `-h` that [`SHOWN`] does not list for this command.
pub fn with_rare_options_hidden(command: Command, path: &str) -> Command {
    let Some((_, shown)) = SHOWN.iter().find(|(name, _)| *name == path) else {
        return command;
    };
    command.mut_args(|arg| {
        let is_rare = !shown.contains(&arg.get_id().as_str());
        arg.hide_short_help(is_rare)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::CommandFactory as _;

    #[test]
    fn arguments_of_short_help_exist() {
        for (path, shown) in SHOWN {
            let mut command = &Cli::command();
            for name in path.split(' ').skip(1) {
                command = command.find_subcommand(name).unwrap();
            }
            for id in *shown {
                let found = command.get_arguments().any(|arg| arg.get_id() == id);
                assert!(found, "{path} has no argument '{id}'");
            }
        }
    }
}
