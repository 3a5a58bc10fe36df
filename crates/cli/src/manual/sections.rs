//! The source of a manual page: sections from the command's definition, and additional ones.

use std::io;

use clap::Command;
use clap_mangen::Man;

use crate::help::{examples, groups};

/// The manual page of a command.
pub struct Page<'a> {
    command: &'a Command,
    /// Name of the page, such as `fathom-disk-add`.
    name: &'a str,
    /// Path of the command, such as `fathom disk add`.
    path: String,
}

type Row = (&'static str, &'static str);

/// Files of servers, which most commands connect to.
const OF_SERVERS: &[Row] = &[
    (
        "/run/fathom/control/PID.sock",
        "The API socket of a server of root.",
    ),
    (
        "$XDG_RUNTIME_DIR/fathom/control/PID.sock",
        "The API socket of a server of another user.",
    ),
];

const OF_CONFIGURATION: &[Row] = &[(
    "/etc/fathom/fathom.toml",
    "The configuration of the system's server. See fathom.toml(5).",
)];

const OF_BASES: &[Row] = &[(
    "/var/cache/fathom",
    "The cache of base images. Users other than root have $XDG_CACHE_HOME/fathom.",
)];

const OF_FLEETS: &[Row] = &[(
    "/etc/fathom/fleet",
    "Certificates of the client: ca-cert.pem, client-cert.pem and client-key.pem.",
)];

const OF_RUNS: &[Row] = &[(
    "NAME.run",
    "A run directory, which the command writes or reads. See fathom-run(5).",
)];

const OF_IMAGES: &[Row] = &[(
    "IMAGE.bitmaps",
    "The dirty bitmaps of a disk that is not a qcow2 image.",
)];

const OF_PAGES: &[Row] = &[("/usr/share/man/man1", "The manual pages of a package.")];

const STATUS: &[Row] = &[
    ("0", "Success."),
    (
        "1",
        "The command failed. A line on standard error names the cause.",
    ),
    ("2", "The arguments are wrong."),
];

const STATUS_OF_SERVE: &[Row] = &[
    ("0", "The server stopped, and all requests were complete."),
    (
        "1",
        "The server failed, or requests were in flight after --stop-timeout and were abandoned.",
    ),
    ("2", "The arguments are wrong."),
];

const STATUS_OF_UPGRADE: &[Row] = &[
    ("0", "All processes were replaced."),
    (
        "1",
        "A process was not replaced and continues, or the command failed.",
    ),
    ("2", "The arguments are wrong."),
];

const STATUS_OF_BENCH: &[Row] = &[
    ("0", "Success."),
    (
        "1",
        "The command failed, requests failed, or --verify found lost, stale, torn or misplaced data.",
    ),
    ("2", "The arguments are wrong."),
];

const STATUS_OF_COMPARE: &[Row] = &[
    ("0", "The images are identical."),
    ("1", "The images differ."),
    (
        "2",
        "An image cannot be opened, or the arguments are wrong.",
    ),
    ("4", "An image cannot be read."),
];

const STATUS_OF_CHECK: &[Row] = &[
    ("0", "The image is consistent, or was repaired."),
    ("1", "The image could not be checked."),
    ("2", "The image is corrupt, or the arguments are wrong."),
    ("3", "The image has leaked clusters, but is not corrupt."),
    ("63", "The format has no checks, as raw."),
];

impl<'a> Page<'a> {
    pub fn new(command: &'a Command) -> Page<'a> {
        let name = command.get_display_name().unwrap_or(command.get_name());
        let path = command.get_bin_name().unwrap_or(name).to_owned();
        Page {
            command,
            name,
            path,
        }
    }

    /// Returns the source in the `man` macros of groff.
    pub fn source(&self) -> io::Result<Vec<u8>> {
        let man = Man::new(self.command.clone())
            .title(self.name.to_uppercase())
            .source(concat!("fathom ", env!("CARGO_PKG_VERSION")))
            .manual("Fathom");
        let mut text = Vec::new();
        man.render_title(&mut text)?;
        man.render_name_section(&mut text)?;
        text.extend(section("SYNOPSIS", &self.synopsis()).as_bytes());
        man.render_description_section(&mut text)?;
        text.extend(options(&man)?.as_bytes());
        if self.subcommands().next().is_some() {
            man.render_subcommands_section(&mut text)?;
        }
        let more = [
            section("EXAMPLES", &self.examples()),
            section("EXIT STATUS", &rows(self.status())),
            section("FILES", &self.files()),
            section("SEE ALSO", &self.see_also()),
        ];
        more.iter().for_each(|one| text.extend(one.as_bytes()));
        Ok(text)
    }

    fn subcommands(&self) -> impl Iterator<Item = &Command> {
        let below = self.command.get_subcommands();
        below.filter(|below| !below.is_hide_set())
    }

    /// Returns the usage as `--help` prints it.
    fn synopsis(&self) -> String {
        let usage = self.command.clone().render_usage().to_string();
        let usage = usage.strip_prefix("Usage:").unwrap_or(&usage);
        let lines: Vec<_> = usage.lines().map(|line| escaped(line.trim())).collect();
        format!("{}\n", lines.join("\n.br\n"))
    }

    fn examples(&self) -> String {
        let examples = examples::of(self.command, &self.path);
        let lines: Vec<_> = examples.iter().map(|line| escaped(line)).collect();
        match lines.is_empty() {
            true => String::new(),
            false => format!(".nf\n{}\n.fi\n", lines.join("\n")),
        }
    }

    fn status(&self) -> &'static [Row] {
        match self.path.as_str() {
            "fathom serve" => STATUS_OF_SERVE,
            "fathom upgrade" => STATUS_OF_UPGRADE,
            "fathom bench" => STATUS_OF_BENCH,
            "fathom img compare" => STATUS_OF_COMPARE,
            "fathom img check" => STATUS_OF_CHECK,
            _ => STATUS,
        }
    }

    /// Returns the top-level command, such as `disk`, or `None` for the program itself.
    fn top(&self) -> Option<&str> {
        self.path.split(' ').nth(1)
    }

    fn files(&self) -> String {
        let all: &[&[Row]] = match self.top() {
            None | Some("serve" | "disk") => &[OF_CONFIGURATION, OF_SERVERS, OF_BASES],
            Some("base") => &[OF_BASES],
            Some("img") => &[OF_IMAGES],
            Some("fleet") => &[OF_FLEETS],
            Some("bench" | "lab" | "report" | "guest") => &[OF_RUNS],
            Some("breakdown") => &[OF_RUNS, OF_SERVERS],
            Some("man" | "completions") => &[OF_PAGES],
            Some("filters") => &[OF_CONFIGURATION],
            Some(_) => &[OF_SERVERS],
        };
        all.iter().map(|some| rows(some)).collect()
    }

    /// Returns references to the parent's page, the subcommands' or siblings' pages, and file
    /// formats.
    fn see_also(&self) -> String {
        let above = self
            .name
            .rsplit_once('-')
            .map(|(above, _)| above.to_owned());
        let beside = match (self.top(), self.path.split(' ').count()) {
            (Some(top), 2) => groups::of(top).map_or(&[][..], |(_, names)| names),
            _ => &[],
        };
        let beside = { beside.iter() }
            .filter(|beside| Some(**beside) != self.top() && **beside != "help")
            .map(|beside| format!("fathom-{beside}"));
        let below = self
            .subcommands()
            .map(|below| format!("{}-{}", self.name, below.get_name()));
        let pages = above.into_iter().chain(below).chain(beside);
        let pages = pages.map(|page| reference(&page, 1));
        let formats = match self.top() {
            None | Some("serve" | "disk") => &["fathom.toml"][..],
            Some("bench" | "lab" | "report" | "guest" | "breakdown") => &["fathom-run"],
            Some(_) => &[],
        };
        let formats = formats.iter().map(|format| reference(format, 5));
        let all: Vec<_> = pages.chain(formats).collect();
        match all.is_empty() {
            true => String::new(),
            false => format!("{}\n", all.join(",\n")),
        }
    }
}

/// Returns the section of options, with their headings as subsections.
fn options(man: &Man) -> io::Result<String> {
    let mut text = Vec::new();
    man.render_options_section(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    // Skips the preamble, which the title has written already.
    let mut lines = text.lines().skip_while(|line| !line.starts_with(".SH"));
    let mut all = String::new();
    if lines.next().is_some() {
        all.push_str(".SH OPTIONS\n");
    }
    for line in lines {
        all.push_str(&line.replacen(".SH ", ".SS ", 1));
        all.push('\n');
    }
    Ok(all)
}

fn section(heading: &str, text: &str) -> String {
    match text.is_empty() {
        true => String::new(),
        false => format!(".SH \"{heading}\"\n{text}"),
    }
}

fn rows(rows: &[Row]) -> String {
    let row = |(term, text): &Row| format!(".TP\n{}\n{}\n", escaped(term), escaped(text));
    rows.iter().map(row).collect()
}

fn reference(page: &str, section: u8) -> String {
    format!("{}({section})", escaped(page))
}

/// Escapes text for groff, which then prints it unchanged.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    match text.starts_with(['.', '\'']) {
        true => format!("\\&{text}"),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_for_groff_is_escaped() {
        assert_eq!(escaped(r".a\b --c 'd'"), r"\&.a\eb \-\-c 'd'");
        assert_eq!(escaped("fathom-run"), r"fathom\-run");
    }
}
