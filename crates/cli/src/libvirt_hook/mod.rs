//! libvirt's hook: adds the disks of a domain before its guest starts, and removes them afterwards.
//!
//! libvirt calls /etc/libvirt/hooks/qemu.d/fathom with the domain's XML on standard input
//! (<https://libvirt.org/hooks.html>). If the hook fails before the guest starts, the guest does
//! not start, and libvirt's error contains what the hook has printed on standard error. A hook must
//! not call libvirt.

mod domain;
mod record;

use crate::servers::{Shown, named_or_only};
use anyhow::{Context, bail};
use clap::Args;
use domain::Domain;
use fathom_client::{Client, ClientError};
use fathom_control::Owner;
use fathom_formats::Format;
use fathom_metrics::Info;
use fathom_spec::DiskSpec;
use record::Record;
use serde_json::{Value, json};
use std::io::{self, Read};

/// Maximum size of a domain's XML in bytes.
const MAX_XML_BYTES: u64 = 16 << 20;
const NOT_FOUND: u16 = 404;
const GATEWAY_TIMEOUT: u16 = 504;

/// Add or remove the disks of a libvirt domain
///
/// libvirt's hook /etc/libvirt/hooks/qemu.d/fathom runs this command, with the domain's XML on
/// standard input.
#[derive(Args, Debug)]
pub struct LibvirtHookArgs {
    /// Name of the domain
    domain: String,
    /// Operation of libvirt: prepare, migrate, release or another one
    operation: String,
    /// Stage of the operation: begin, end or -
    stage: String,
    /// Ignored; libvirt passes it
    #[arg(hide = true)]
    extra: Option<String>,
}

pub fn run(args: LibvirtHookArgs) -> anyhow::Result<()> {
    let event = (args.operation.as_str(), args.stage.as_str());
    if !matches!(event, ("prepare" | "migrate", "begin") | ("release", "end")) {
        return Ok(());
    }
    let mut xml = String::new();
    io::stdin()
        .take(MAX_XML_BYTES)
        .read_to_string(&mut xml)
        .context("the domain's XML")?;
    // Guests without Fathom's disks must start even if the XML is unusual.
    if event.0 != "release" && !xml.contains(domain::NAMESPACE) {
        return Ok(());
    }
    let domain = Domain::parse(&xml).with_context(|| format!("domain '{}'", args.domain))?;
    match event.0 {
        "release" => remove(&domain),
        operation => add(domain, operation == "migrate"),
    }
    .with_context(|| format!("domain '{}'", args.domain))
}

/// Adds the disks of a domain. On an error, removes those that were added before.
fn add(domain: Domain, is_incoming: bool) -> anyhow::Result<()> {
    let disks = domain.disks?;
    if disks.is_empty() {
        return Ok(());
    }
    let server = named_or_only(domain.server.as_deref())?;
    let mut record = Record::load(&domain.uuid)?;
    // libvirt announces an incoming migration first, and then prepares the domain as for any start.
    let is_incoming = is_incoming || record.is_incoming;
    record.is_incoming = is_incoming;
    let mut added = Vec::new();
    for table in &disks {
        let outcome = add_one(&server, &mut record, table, is_incoming);
        match outcome.with_context(|| format!("disk '{}'", table.name)) {
            Ok(true) => added.push(table.name.as_str()),
            Ok(false) => {}
            Err(error) => {
                undo(&server, &mut record, &added);
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Whether the server has certainly not carried out the request.
fn is_refusal(error: &ClientError) -> bool {
    match error {
        ClientError::Refused { status, .. } => *status != GATEWAY_TIMEOUT,
        ClientError::NotRunning(_) | ClientError::Denied(_) => true,
        _ => false,
    }
}

/// Adds a disk. Returns false if the server already has the same disk.
fn add_one(
    server: &Client,
    record: &mut Record,
    table: &DiskSpec,
    is_incoming: bool,
) -> anyhow::Result<bool> {
    let place = ["v1", "disks", &table.name];
    if let Some(there) = existing(server, &table.name)? {
        if is_same(&there.table, table) {
            if there.owner != Some(Owner::Static) {
                record.insert(&table.name)?;
            }
            return Ok(false);
        }
        if !record.contains(&table.name) {
            bail!(
                "the server has a disk of this name with other options; choose another name in the domain's metadata, \
                 or remove that disk (fathom disk remove {})",
                table.name
            );
        }
        delete(server, &table.name)?;
    }
    record.insert(&table.name)?;
    let put = server.put(&place).header("if-none-match", "*").json(table);
    let shown: Shown = match put.patiently().send() {
        Ok(shown) => shown,
        Err(error) => {
            // Without the server's refusal, the disk may have been added: the hook at the domain's
            // end must remove it.
            if is_refusal(&error) {
                record.remove(&table.name)?;
            }
            return Err(error.into());
        }
    };
    let Info { held_by, disk, .. } = shown.info();
    if let (Some(holder), false) = (held_by, is_incoming) {
        undo(server, record, &[&table.name]);
        bail!("{disk} is in use by {holder}; stop that before the domain starts");
    }
    Ok(true)
}

/// A disk of the server.
struct Existing {
    table: DiskSpec,
    owner: Option<Owner>,
}

fn existing(server: &Client, name: &str) -> anyhow::Result<Option<Existing>> {
    let shown: Value = match server.get(&["v1", "disks", name]).send() {
        Err(ClientError::Refused { status, .. }) if status == NOT_FOUND => return Ok(None),
        outcome => outcome?,
    };
    Ok(Some(Existing {
        table: serde_json::from_value(shown["options"].clone()).context("its options")?,
        owner: serde_json::from_value(shown["owner"].clone()).ok(),
    }))
}

/// Whether both definitions are the same disk.
///
/// The definition of a persistent disk names the format raw, which is also the default.
fn is_same(there: &DiskSpec, wanted: &DiskSpec) -> bool {
    let mut wanted = wanted.clone();
    if wanted.format.is_none() && there.format == Some(Format::Raw) {
        wanted.format = there.format;
    }
    // The server sets this option if the hook does not.
    wanted.nbd = wanted.nbd.or(there.nbd);
    *there == wanted
}

fn delete(server: &Client, name: &str) -> Result<(), ClientError> {
    let delete = server.delete(&["v1", "disks", name]).patiently();
    match delete.send::<Value>() {
        Err(ClientError::Refused { status, .. }) if status == NOT_FOUND => Ok(()),
        outcome => outcome.map(drop),
    }
}

/// Removes disks after an error. Errors here are only printed, because the first one is returned.
fn undo(server: &Client, record: &mut Record, names: &[&str]) {
    for name in names {
        let outcome = delete(server, name).map_err(anyhow::Error::from);
        if let Err(error) = outcome.and_then(|()| record.remove(name)) {
            eprintln!("fathom: disk '{name}' stays in the server: {error:#}");
        }
    }
}

/// Removes the disks that the hook has added for a domain.
fn remove(domain: &Domain) -> anyhow::Result<()> {
    let mut record = Record::load(&domain.uuid)?;
    if record.names().is_empty() {
        return record.end();
    }
    let server = named_or_only(domain.server.as_deref())?;
    for name in record.names() {
        delete(&server, &name).with_context(|| format!("disk '{name}'"))?;
        record.remove(&name)?;
    }
    record.end()
}

/// Builds a disk definition from names and strings, as in the server's configuration.
fn table(options: &[(&str, &str)]) -> anyhow::Result<DiskSpec> {
    let mut table = json!({});
    for (option, text) in options {
        table[option] = typed(option, text);
    }
    serde_json::from_value(table).map_err(anyhow::Error::from)
}

/// Converts a string to the option's type: a number or boolean if valid, else a string or a list of
/// one string.
fn typed(option: &str, text: &str) -> Value {
    let boolean = match text {
        "yes" | "on" => Some(true),
        "no" | "off" => Some(false),
        _ => None,
    };
    let candidates = [
        Some(json!(text)),
        boolean.map(Value::from),
        serde_json::from_str(text).ok(),
        Some(json!([text])),
    ];
    let is_valid = |value: &Value| {
        let mut tried = json!({ "image": "null:1M" });
        tried[option] = value.clone();
        serde_json::from_value::<DiskSpec>(tried).is_ok()
    };
    let mut valid = candidates.into_iter().flatten().filter(is_valid);
    valid.next().unwrap_or_else(|| json!(text))
}
