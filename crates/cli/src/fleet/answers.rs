//! What comes of asking all hosts: from some nothing but why not.

use crate::servers::Failed;
use anyhow::bail;
use fathom_client::fleet::{Session, ask_all};
use fathom_client::{ClientError, Server};
use std::time::Duration;

/// So many of those that have failed are named to people.
const NAMED: usize = 10;

/// Asks all of them; `take` gets each answer as it comes. Fails when none has answered.
pub fn ask<T>(
    servers: &[Server],
    timeout: Duration,
    ask: impl AsyncFn(&mut Session<'_>) -> Result<T, ClientError>,
    mut take: impl FnMut(usize, T),
) -> anyhow::Result<Vec<Failed>> {
    let mut failed = Vec::new();
    ask_all(servers, timeout, ask, |index, answer| match answer {
        Ok(answer) => take(index, answer),
        Err(error) => failed.push(Failed {
            host: servers[index].to_string(),
            problem: match &error {
                // Their own words name no host.
                ClientError::Refused { text, .. } => format!("{}: {text}", servers[index]),
                other => other.to_string(),
            },
        }),
    })?;
    failed.sort_by(|a, b| a.host.cmp(&b.host));
    match failed.first() {
        Some(first) if failed.len() == servers.len() => match servers.len() {
            1 => bail!("{}", first.problem),
            n => bail!("none of {n} hosts has responded: {}", first.problem),
        },
        _ => Ok(failed),
    }
}

/// For people, who see the others' answers.
pub fn tell(failed: &[Failed], all: usize) {
    for one in failed.iter().take(NAMED) {
        eprintln!("fathom: {}", fathom_img::shown(&one.problem));
    }
    if !failed.is_empty() {
        let more = match failed.len() > NAMED {
            true => format!(" (--json names all of them; {NAMED} are shown)"),
            false => String::new(),
        };
        eprintln!(
            "fathom: {} of {all} hosts have not responded{more}",
            failed.len()
        );
    }
}
