//! `fathom filters` and `fathom set`: lists filters, and changes filters of a running server.

use crate::servers::{absolute, note_reply};
use crate::target::Target;
use clap::Args;
use fathom_filters::{About, FILTERS, find};
use fathom_stack::FilterInfo;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

/// List the filters and their options
///
/// `fathom serve --filter` and `fathom disk add --filter` add a filter to a disk.
#[derive(Args, Debug)]
pub struct FiltersArgs {
    /// Show only this filter, such as throttle
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn list(args: FiltersArgs) -> anyhow::Result<()> {
    let filters: Vec<&About> = match &args.name {
        Some(name) => vec![find(name).map_err(anyhow::Error::msg)?.about],
        None => FILTERS.iter().map(|filter| filter.about).collect(),
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        let filters: Vec<_> = filters.into_iter().map(to_json).collect();
        writeln!(out, "{}", Value::from(filters))?;
        return Ok(());
    }
    for (n, filter) in filters.into_iter().enumerate() {
        if n > 0 {
            writeln!(out)?;
        }
        print(&mut out, filter)?;
    }
    Ok(())
}

fn print(out: &mut impl Write, filter: &About) -> std::io::Result<()> {
    writeln!(out, "{}: {}", filter.name, filter.what)?;
    for option in filter.options {
        writeln!(out, "  {}={}", option.name, option.value)?;
        let more = match option.default {
            None => " (by `fathom set` only)".into(),
            Some("") => String::new(),
            Some(default) => format!(" [default: {default}]"),
        };
        writeln!(out, "      {}{more}", option.what)?;
    }
    Ok(())
}

fn to_json(filter: &About) -> Value {
    let options = filter.options.iter().map(|option| {
        json!({
            "name": option.name,
            "value": option.value,
            "default": option.default,
            "what": option.what,
        })
    });
    json!({
        "name": filter.name,
        "what": filter.what,
        "options": options.collect::<Vec<_>>(),
    })
}

/// Change options of a disk's filter
///
/// All options change at once, while the disk is in use. An option without a value (read=) is reset
/// to its default. `fathom filters` lists the options, and `fathom show` shows the present values.
#[derive(Args, Debug)]
pub struct SetArgs {
    #[command(flatten)]
    target: Target,

    /// Name of the filter, such as throttle, or throttle#2 for the second filter of that name
    #[arg(value_name = "FILTER[#N]")]
    filter: String,

    /// Options with their new values, such as iops-total=500
    #[arg(value_name = "OPTION=VALUE", required = true, value_parser = parse_option)]
    options: Vec<(String, String)>,

    /// Undo the change when the server restarts
    #[arg(long = "transient", alias = "temporary")]
    temporary: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn parse_option(text: &str) -> Result<(String, String), String> {
    let option = text.split_once('=').filter(|(name, _)| !name.is_empty());
    let (name, value) = option.ok_or("not OPTION=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

pub fn set(args: SetArgs) -> anyhow::Result<()> {
    let options = changes(&args.filter, args.options)?;
    let filter = args.filter;
    let disk = args.target.disk()?;
    let place = ["v1", "disks", &disk.name, "filters", &filter];
    let set = disk.server.patch(&place).json(&options);
    let reply: Value = set.flag("temporary", args.temporary).send()?;
    note_reply(&disk.name, &reply);
    let info = FilterInfo::deserialize(reply)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&info)?)?;
    } else {
        writeln!(out, "{info}")?;
    }
    Ok(())
}

/// Returns the given options of a filter as a map, with absolute paths.
///
/// # Errors
///
/// Fails if an option is given twice.
pub fn changes(
    filter: &str,
    given: Vec<(String, String)>,
) -> anyhow::Result<BTreeMap<String, String>> {
    let mut options = BTreeMap::new();
    for (name, value) in given {
        let value = in_this_directory(filter, &name, value)?;
        if options.insert(name.clone(), value).is_some() {
            anyhow::bail!("{name} is given twice");
        }
    }
    Ok(options)
}

/// Makes the value of a file option absolute, because the server may have another directory.
///
/// Unknown filters and options are left unchanged; the server rejects them.
pub fn in_this_directory(filter: &str, option: &str, value: String) -> anyhow::Result<String> {
    let name = filter.split('#').next().unwrap_or_default();
    let options = find(name).map_or(&[][..], |filter| filter.about.options);
    let known = options.iter().find(|known| known.name == option);
    if value.is_empty() || !known.is_some_and(|known| ["FILE", "DIR"].contains(&known.value)) {
        return Ok(value);
    }
    let path = absolute(Path::new(&value))?;
    Ok(path.to_string_lossy().into_owned())
}
