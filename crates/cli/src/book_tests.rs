//! Tests that the commands in the documentation have valid arguments.

#[path = "../tests/book/pages.rs"]
mod pages;

use crate::Cli;
use clap::{CommandFactory as _, error::Error, error::ErrorKind};
use std::path::Path;

/// Returns the `fathom` commands in a line, with their arguments.
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
    let (mut count, mut wrong) = (0, Vec::new());
    for page in pages::all(root) {
        for block in &page.blocks {
            // A command that must fail may have invalid arguments.
            if block.file.is_some() || block.is("fails") {
                continue;
            }
            let text = block.text.replace("\\\n", "");
            for command in text.lines().flat_map(commands) {
                count += 1;
                let parsed = Cli::command().try_get_matches_from(&command);
                let is_help = |error: &Error| error.kind() == ErrorKind::DisplayHelp;
                if let Some(error) = parsed.err().filter(|error| !is_help(error)) {
                    let error = error.to_string();
                    // An option may name a file that another block creates.
                    if !error.to_lowercase().contains("no such file") {
                        wrong.push(format!("{}:{}: {error}", page.path, block.line));
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
}
