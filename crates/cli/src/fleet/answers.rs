//! Sends a request to all hosts, and reports those that fail.

use crate::servers::Failed;
use anyhow::bail;
use fathom_client::fleet::{Session, ask_all};
use fathom_client::{ClientError, Server};
use std::time::Duration;

/// Maximum number of failed hosts to name in messages.
const NAMED: usize = 10;

/// Sends the request `ask` to all servers; `take` receives each reply when it arrives.
///
/// Returns the failed hosts.
///
/// # Errors
///
/// Fails if all hosts have failed.
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
                // The server's own error does not name the host.
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

/// Prints the failed hosts on stderr, for users who see the other hosts' replies.
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
