//! Commands that the documentation shows have arguments that there are.

use crate::Cli;
use clap::{CommandFactory as _, error::Error, error::ErrorKind};
use std::fs;
use std::path::Path;

/// Lines of blocks of code, continued ones joined, with where each begins.
fn lines(text: &str) -> Vec<(usize, String)> {
    let mut lines = Vec::<(usize, String)>::new();
    let (mut is_code, mut goes_on) = (false, false);
    for (number, line) in text.lines().enumerate() {
        if line.starts_with("```") {
            is_code = line.starts_with("```sh");
            continue;
        }
        if !is_code && !line.starts_with("    ") {
            continue;
        }
        let (line, more) = match line.strip_suffix('\\') {
            Some(line) => (line, true),
            None => (line, false),
        };
        match lines.last_mut().filter(|_| goes_on) {
            Some((_, last)) => last.push_str(line),
            None => lines.push((number + 1, line.to_owned())),
        }
        goes_on = more;
    }
    lines
}

/// Each `fathom` of a line, with its arguments.
fn commands(line: &str) -> Vec<Vec<String>> {
    let words = shlex::split(line).unwrap_or_default();
    let parts = words.split(|word| matches!(word.as_str(), "|" | "||" | "&&" | "&" | ";"));
    parts
        .filter_map(|part| {
            let at = part.iter().position(|word| word == "fathom")?;
            let is_run = |before: &String| {
                before == "sudo" || before == "timeout" || before.parse::<u32>().is_ok()
            };
            let part = part[..at].iter().all(is_run).then(|| &part[at..])?;
            let shell = |word: &&String| !word.starts_with(['>', '<']) && !word.starts_with("2>");
            Some(part.iter().take_while(shell).cloned().collect())
        })
        .collect()
}

#[test]
fn commands_of_the_documentation_have_arguments_that_there_are() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let mut paths = vec![root.join("README.md")];
    for folder in ["docs", "docs/img"] {
        let files = fs::read_dir(root.join(folder)).unwrap();
        let files = files.map(|file| file.unwrap().path());
        paths.extend(files.filter(|path| path.extension().is_some_and(|kind| kind == "md")));
    }
    let (mut count, mut wrong) = (0, Vec::new());
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in lines(&text) {
            for command in commands(&line) {
                count += 1;
                let parsed = Cli::command().try_get_matches_from(&command);
                let is_help = |error: &Error| error.kind() == ErrorKind::DisplayHelp;
                if let Some(error) = parsed.err().filter(|error| !is_help(error)) {
                    let error = error.to_string();
                    // A file that an option names may be another block's.
                    if !error.contains("No such file") {
                        wrong.push(format!("{}:{number}: {error}", path.display()));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 100, "only {count} commands found");
}

#[test]
fn commands_are_found_in_lines() {
    let words = |line: &str| commands(line).into_iter().map(|words| words.join(" "));
    let found: Vec<_> = words("timeout 3 fathom top --once >x && fathom list # all").collect();
    assert_eq!(found, ["fathom top --once", "fathom list"]);
    assert_eq!(commands("man fathom"), [[""; 0]; 0]);
    let text = "```sh\nfathom a \\\n  b\n```\nfathom c\n\n    fathom d\n";
    let found: Vec<_> = lines(text).into_iter().map(|(_, line)| line).collect();
    assert_eq!(found, ["fathom a   b", "    fathom d"]);
}
