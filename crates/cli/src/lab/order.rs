//! `fathom lab run EXPERIMENT`: a subcommand for each experiment, built from its description.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches, Subcommand};
use fathom_lab::experiment::runner::default_output;
use fathom_lab::experiment::{self, Experiment, Kind, Order, Parameter};

use super::{How, Show};

/// An experiment and the options for its run.
pub struct Ordered {
    pub order: Order,
    output: Option<PathBuf>,
    pub show: Show,
    pub how: How,
}

// Options of all experiments. (A doc comment would become the command's description.)
#[derive(Debug, Args)]
struct Common {
    /// Set a parameter by its name; repeatable
    ///
    /// Several values make an axis, and each combination of all axes is run as a cell.
    #[arg(long = "set", value_name = "NAME=VALUE,...", value_parser = parse_setting, help_heading = "Run",
          hide_short_help = true)]
    settings: Vec<(String, String)>,
    /// Seed for the order of the cells [default: from the clock]
    #[arg(long, value_name = "N", help_heading = "Run", hide_short_help = true)]
    seed: Option<u64>,
    /// Run directory to create [default: fathom-EXPERIMENT-TIME.run]
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    output: Option<PathBuf>,
    #[command(flatten)]
    show: Show,
    #[command(flatten)]
    how: How,
}

const ROUNDS: &str = "rounds";

fn parse_setting(text: &str) -> Result<(String, String), String> {
    let (name, values) = text
        .split_once('=')
        .ok_or_else(|| format!("'{text}' is not NAME=VALUE"))?;
    Ok((name.to_owned(), values.to_owned()))
}

impl Ordered {
    /// Returns the path of the run directory.
    pub fn output(&self) -> PathBuf {
        let default = || default_output(self.order.experiment);
        self.output.clone().unwrap_or_else(default)
    }

    fn new(one: &'static dyn Experiment, matches: &ArgMatches) -> Result<Ordered, Error> {
        let invalid =
            |error: fathom_lab::Error| Error::raw(ErrorKind::ValueValidation, format!("{error}\n"));
        let common = Common::from_arg_matches(matches)?;
        let mut order = Order::new(one);
        for parameter in one.parameters() {
            if let Some(texts) = matches.get_many::<String>(parameter.name) {
                let texts: Vec<String> = texts.cloned().collect();
                order.set(parameter.name, &texts).map_err(invalid)?;
            }
        }
        let mut settings = common.settings;
        while let Some((name, first)) = settings.first().cloned() {
            let (same, others) = settings.into_iter().partition(|(other, _)| *other == name);
            settings = others;
            let same: Vec<(String, String)> = same;
            let texts: Vec<String> = match same.len() {
                1 => vec![first],
                _ => same.into_iter().map(|(_, text)| text).collect(),
            };
            order.set(&name, &texts).map_err(invalid)?;
        }
        if !has_rounds(one) {
            order.rounds = matches
                .get_one::<u32>(ROUNDS)
                .copied()
                .unwrap_or(one.rounds());
        }
        order.seed = common.seed.unwrap_or_else(by_the_clock);
        Ok(Ordered {
            order,
            output: common.output,
            show: common.show,
            how: common.how,
        })
    }
}

/// Whether the experiment repeats its rounds inside a cell.
fn has_rounds(one: &dyn Experiment) -> bool {
    one.parameters()
        .iter()
        .any(|parameter| parameter.name == ROUNDS)
}

fn by_the_clock() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}

fn command(one: &'static dyn Experiment) -> Command {
    let command = Command::new(one.name()).about(one.about());
    let command = command.args(one.parameters().iter().map(argument));
    let command = match has_rounds(one) {
        true => command,
        false => {
            let rounds = Arg::new(ROUNDS)
                .long(ROUNDS)
                .value_name("N")
                .help_heading("Run");
            let rounds = rounds.value_parser(clap::value_parser!(u32).range(1..=1000));
            let default = one.rounds();
            command.arg(rounds.help(format!("Number of runs of each cell [default: {default}]")))
        }
    };
    Common::augment_args(command)
}

fn argument(parameter: &Parameter) -> Arg {
    let default = match parameter.default {
        "" => String::new(),
        default => format!(" [default: {default}]"),
    };
    let argument = Arg::new(parameter.name)
        .long(parameter.name)
        .action(ArgAction::Append)
        .help_heading("Parameters")
        .hide_short_help(parameter.rare)
        .help(format!("{}{default}", parameter.about))
        .long_help(format!(
            "{}\n\nValues: {}{default}",
            parameter.about,
            parameter.kind.range()
        ));
    let argument = match parameter.name {
        "seconds" => argument.visible_alias("runtime"),
        _ => argument,
    };
    match parameter.kind {
        // `--poll` without a value means on.
        Kind::Switch => argument
            .value_name("on|off")
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("on"),
        Kind::Text | Kind::List => argument.value_name("TEXT").allow_hyphen_values(true),
        _ => argument.value_name("VALUE,..."),
    }
}

impl Subcommand for Ordered {
    fn augment_subcommands(app: Command) -> Command {
        experiment::ALL
            .iter()
            .fold(app, |app, one| app.subcommand(command(*one)))
    }

    fn augment_subcommands_for_update(app: Command) -> Command {
        Self::augment_subcommands(app)
    }

    fn has_subcommand(name: &str) -> bool {
        experiment::find(name).is_some()
    }
}

impl FromArgMatches for Ordered {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Ordered, Error> {
        let chosen = matches.subcommand();
        let found = chosen.and_then(|(name, given)| Some((experiment::find(name)?, given)));
        match found {
            Some((one, given)) => Ordered::new(one, given),
            None => Err(Error::raw(
                ErrorKind::MissingSubcommand,
                "name an experiment (`fathom lab list`)\n",
            )),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl std::fmt::Debug for Ordered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.order.experiment.name())
    }
}

/// Wraps a paragraph into lines of at most 79 bytes.
pub fn wrapped(text: &str) -> String {
    const WIDTH: usize = 79;
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Lab {
        #[command(subcommand)]
        ordered: Ordered,
    }

    fn plan(args: &[&str]) -> Result<fathom_run::Experiment, String> {
        let args = ["lab"].iter().chain(args);
        let lab = Lab::try_parse_from(args).map_err(|error| error.to_string())?;
        lab.ordered.order.plan().map_err(|error| error.to_string())
    }

    #[test]
    fn options_and_settings_say_the_same() {
        let by_option = plan(&["seqread", "--disk", "qemu,qsd", "--seed=1", "--rounds", "2"]);
        let by_setting = plan(&[
            "seqread",
            "--set",
            "disk=qemu,qsd",
            "--seed=1",
            "--rounds=2",
        ]);
        assert_eq!(by_option, by_setting);
        assert_eq!(by_option.unwrap().cells.len(), 4);
        let one = plan(&[
            "wiki",
            "--filter=delay:read=1ms,write=2ms",
            "--filter",
            "pause",
        ]);
        let filter = &one.unwrap().parameters["filter"];
        assert_eq!(*filter, ["delay:read=1ms,write=2ms\npause"]);
    }

    /// The experiment `wiki` repeats its rounds inside a cell.
    #[test]
    fn rounds_of_the_wiki_are_its_own() {
        let plan = plan(&["wiki", "--rounds", "5", "--poll"]).unwrap();
        assert_eq!((plan.rounds, plan.cells.len()), (1, 1));
        assert_eq!(plan.cells[0].settings["rounds"], "5");
        assert_eq!(plan.cells[0].settings["poll"], "on");
    }

    #[test]
    fn bad_arguments_are_named() {
        for (args, words) in [
            (
                &["seqread", "--size", "lots"][..],
                "--size: 'lots' is not a size",
            ),
            (&["seqread", "--set", "colour=red"], "'colour'"),
            (&["seqread", "--set", "disk"], "not NAME=VALUE"),
            (&["seqread", "--rounds", "0"], "1..=1000"),
            (&["wiki", "--rounds", "0"], "not within 1 to 100"),
            (&["wiki", "--inject", "moon=1ms"], "'moon' is none of guest"),
            (&["other"], "unrecognized subcommand 'other'"),
            (
                &["wiki", "--disk", "qsd", "--transport", "no-ioeventfd"],
                "--disk qemu",
            ),
        ] {
            let error = plan(args).unwrap_err();
            assert!(error.contains(words), "{args:?}: {error}");
        }
    }
}
