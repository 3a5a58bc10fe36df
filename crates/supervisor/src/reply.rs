//! Reads replies of tenants. Each reply is parsed as the type that its command expects, and as
//! nothing else.
//!
//! A tenant's process may be under the control of its guest. The supervisor takes names, paths,
//! owners and sizes from its own records and from what it asked, and all texts are made safe to
//! show.

use super::log::shown;
use fathom_control::SwitchTo;
use fathom_control::{ErrorKind, RequestError};
use fathom_host::link::FromTenant;
use fathom_metrics::clean;
use fathom_metrics::{BackupInfo, Bitmaps, Info, MirrorInfo, Snapshots, StreamInfo, TenantLimits};
use fathom_metrics::{Measured, Sent};
use fathom_requests::{
    Answer, Command, Filter, Frozen, Reply, Shown, Size, SlowRequests, TraceState,
};
use fathom_spec::DiskSpec;
use fathom_stack::FilterInfo;
use fathom_trace::Summary;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

/// Maximum number of requests in a list of slow ones.
const MAX_SLOW: usize = 256;
/// Number of bytes by which a disk may become larger than requested, because its size is rounded up
/// to a block.
const MAX_BLOCK: u64 = 64 << 10;

/// The supervisor's records of the disk that a reply is about.
pub struct Known<'a> {
    pub name: &'a str,
    /// None: the tenant does not have the disk any more.
    pub table: Option<&'a DiskSpec>,
    pub pid: u32,
    pub limits: Option<TenantLimits>,
}

/// Rejects commands that no tenant's process can carry out: a reply that reports success would be
/// false.
pub fn refuse(command: &Command, name: &str) -> Result<(), RequestError> {
    let conflict =
        |problem: &str| Err(ErrorKind::Conflict.because(format!("disk '{name}': {problem}")));
    match command {
        Command::BeginBackup { .. } => {
            conflict("a tenant's disk in use cannot be backed up; stop its virtual machine first")
        }
        Command::BeginMirror(_) => conflict("tenants' disks cannot be mirrored"),
        Command::Job { id, .. } => conflict(&format!(
            "job {id} cannot be changed: the disk belongs to a tenant"
        )),
        Command::BeginCommit(_) | Command::BeginStream(_) => {
            conflict("images of a tenant's disk in use cannot be merged")
        }
        Command::BeginSwitch {
            to: SwitchTo::Layer(_),
            ..
        } => conflict("snapshots of a tenant's disk in use are not supported"),
        Command::BeginSwitch {
            to: SwitchTo::Mirror,
            ..
        }
        | Command::EndSwitch { .. } => {
            Err(ErrorKind::Unknown.because(format!("disk '{name}': no mirror is in progress")))
        }
        _ => Ok(()),
    }
}

/// The part of a disk that is read from the reply of a tenant's process.
#[derive(Serialize, Deserialize)]
struct State {
    state: Info,
}

/// Reads the reply to `command`, a whole message. `is_new`: whether the command adds the disk. A
/// reply of another type is an error, as if the command had failed.
pub fn read(command: &Command, is_new: bool, known: &Known<'_>, message: Vec<u8>) -> Answer {
    let text = &message[..];
    match command {
        Command::Stats | Command::Remove { .. } => typed::<Summary>(known, text, plain),
        Command::Slow => typed(known, text, |mut slow: SlowRequests| {
            slow.requests.truncate(MAX_SLOW);
            plain(slow)
        }),
        Command::Measure => measured(known, message),
        Command::Trace { file } => parse::<IgnoredAny>(known, text).map(|_| {
            TraceState {
                trace: file.clone(),
            }
            .into()
        }),
        Command::Resize { size, .. } => typed(known, text, |resized: Size| {
            let is_sized = known
                .table
                .is_some_and(|table| table.image.with_size(1 << 20).is_some());
            let is_plausible = match size {
                Some(size) => (*size..=size.saturating_add(MAX_BLOCK)).contains(&resized.size),
                None => !is_sized,
            };
            match is_plausible {
                true => plain(resized),
                false => Err(format!("{} unexpected bytes", resized.size)),
            }
        }),
        Command::Freeze { .. } | Command::Thaw => typed::<Frozen>(known, text, plain),
        Command::Set { .. } => typed(known, text, |info: FilterInfo| {
            Ok(Filter::new(info, None).into())
        }),
        Command::Bitmaps(_) => typed::<Bitmaps>(known, text, plain),
        Command::Snapshots(_) => typed::<Snapshots>(known, text, plain),
        Command::EndBackup { .. } | Command::GoOnWithBackup { .. } => {
            typed::<BackupInfo>(known, text, plain)
        }
        Command::EndMirror { .. } => typed::<MirrorInfo>(known, text, plain),
        Command::EndStream => typed::<StreamInfo>(known, text, plain),
        Command::Show => typed(known, text, |said: State| {
            disk(known, known.table, said, false)
        }),
        Command::Put { options, .. } => {
            let table = (**options).clone().without_defaults();
            typed(known, text, |said: State| {
                disk(known, Some(&table), said, is_new)
            })
        }
        Command::BeginBackup { .. }
        | Command::BeginMirror(_)
        | Command::BeginCommit(_)
        | Command::BeginStream(_)
        | Command::BeginSwitch { .. }
        | Command::EndSwitch { .. }
        | Command::Job { .. } => {
            Err(ErrorKind::Invalid.because("a tenant's process does not support this command"))
        }
    }
}

/// Reads a reply with a `T`, makes its texts safe to show, and converts the result.
fn typed<T: Serialize + DeserializeOwned>(
    known: &Known<'_>,
    message: &[u8],
    convert: impl FnOnce(T) -> Result<Reply, String>,
) -> Answer {
    let content = cleaned(parse::<T>(known, message)?).and_then(convert);
    content.map_err(|problem| malformed(known, &problem))
}

/// Reads a reply with a `T`.
fn parse<T: DeserializeOwned>(known: &Known<'_>, message: &[u8]) -> Result<T, RequestError> {
    let message = serde_json::from_slice::<FromTenant<T>>(message);
    match message.map_err(|error| malformed(known, &error.to_string()))? {
        FromTenant::Answer {
            answer: Ok(content),
            ..
        } => Ok(content),
        FromTenant::Answer {
            answer: Err(RequestError { kind, text }),
            ..
        } => Err(kind.because(shown(&text))),
        _ => Err(malformed(known, "not a reply")),
    }
}

/// Makes the texts of a reply safe to show.
fn cleaned<T: Serialize + DeserializeOwned>(content: T) -> Result<T, String> {
    let value = serde_json::to_value(content).map(|mut value| {
        clean(&mut value);
        value
    });
    let content = value.and_then(serde_json::from_value);
    content.map_err(|error| error.to_string())
}

fn malformed(known: &Known<'_>, problem: &str) -> RequestError {
    let (name, problem) = (known.name, shown(problem));
    ErrorKind::Failed.because(format!(
        "disk '{name}': the disk's process sent a malformed reply: {problem}"
    ))
}

fn plain<T: Into<Reply>>(content: T) -> Result<Reply, String> {
    Ok(content.into())
}

/// Returns a disk as clients see it. `table`: the disk's options.
fn disk(
    known: &Known<'_>,
    table: Option<&DiskSpec>,
    said: State,
    created: bool,
) -> Result<Reply, String> {
    let table = table.ok_or("no such disk in the tenant's process")?;
    let said = said.state;
    let state = Info {
        name: known.name.to_owned(),
        pid: known.pid,
        disk: table.image.to_string(),
        pool: table.pool.clone(),
        vhost_user: table.vhost_user.as_ref().map(ToString::to_string),
        trace: said.trace.and(table.trace.clone()),
        limits: known.limits.clone(),
        // A tenant's process has none of these.
        nbd: None,
        fuse: None,
        backup: None,
        mirror: None,
        stream: None,
        starting: None,
        ..said
    };
    let options = table.clone();
    Ok(Shown {
        options,
        state,
        created,
    }
    .into())
}

/// Only checks the reply, and keeps its text: measurements are large, so another thread reads them
/// later.
fn measured(known: &Known<'_>, message: Vec<u8>) -> Answer {
    parse::<IgnoredAny>(known, &message)?;
    let message = String::from_utf8(message);
    let message = message.map_err(|error| ErrorKind::Failed.because(error.to_string()))?;
    Ok(Sent {
        name: known.name.to_owned(),
        pid: known.pid,
        message,
        parse: measurements,
    }
    .into())
}

fn measurements(message: &str) -> Result<Measured, String> {
    let message = serde_json::from_str::<FromTenant<Measured>>(message);
    match message.map_err(|error| error.to_string())? {
        FromTenant::Answer {
            answer: Ok(measured),
            ..
        } => Ok(measured),
        _ => Err("not a message with measurements".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn table() -> DiskSpec {
        let text =
            r#"{"name": "a", "image": "/srv/a.raw", "tenant": "vm", "vhost-user": "/run/a"}"#;
        serde_json::from_str(text).unwrap()
    }

    /// Reads the reply, and returns what the client gets.
    fn read_as(command: &Command, is_new: bool, content: Value) -> Result<Value, RequestError> {
        read_reply(command, is_new, content).map(|reply| serde_json::to_value(reply).unwrap())
    }

    fn read_reply(command: &Command, is_new: bool, content: Value) -> Answer {
        let table = table();
        let known = Known {
            name: "a",
            table: Some(&table),
            pid: 42,
            limits: None,
        };
        let answer = Ok(content);
        let message = FromTenant::Answer { number: 1, answer };
        read(
            command,
            is_new,
            &known,
            serde_json::to_vec(&message).unwrap(),
        )
    }

    /// The state that an honest process sends.
    fn state() -> Value {
        json!({
            "version": "", "pid": 1, "name": "a", "disk": "/a", "format": "raw", "size": 1 << 20,
            "block_size": 512, "read_only": false, "engine": "io_uring", "max_queues": 1,
            "queues_running": 0, "filters": [], "uptime_seconds": 1,
            "workers": [{"requests": 0, "notifications": 0, "sleeps": 0}]
        })
    }

    #[test]
    fn shown_disk_has_the_supervisors_options_and_names() {
        let mut lie = state();
        for (key, value) in [
            ("name", json!("other")),
            ("pid", json!(1)),
            ("disk", json!("/etc/shadow")),
            ("vhost_user", json!("/run/other")),
            ("trace", json!("/etc/shadow")),
            ("format", json!("raw\u{1b}[2J")),
            ("limits", json!({"memory": 1})),
            (
                "nbd",
                json!({"addresses": [], "tls": false, "export": "x", "connections": []}),
            ),
        ] {
            lie[key] = value;
        }
        let options = json!({"name": "other", "image": "/etc/shadow", "allow-dirs": ["/"]});
        let content = json!({"options": options, "state": lie, "kept": true});
        let shown = read_as(&Command::Show, false, content).unwrap();
        assert_eq!(shown["options"], serde_json::to_value(table()).unwrap());
        let state = &shown["state"];
        assert_eq!((&state["name"], &state["pid"]), (&json!("a"), &json!(42)));
        assert_eq!(state["disk"], "/srv/a.raw");
        assert_eq!(
            (&state["vhost_user"], &state["trace"]),
            (&json!("/run/a"), &Value::Null)
        );
        assert_eq!(state["format"], "raw\\u{1b}[2J");
        assert_eq!(
            (&state["limits"], &state["nbd"]),
            (&Value::Null, &Value::Null)
        );
        assert!(!shown.to_string().contains("shadow") && shown.get("kept").is_none());
    }

    #[test]
    fn reply_of_another_kind_is_an_error() {
        let anything = [
            json!(null),
            json!([1]),
            json!({"options": {}}),
            json!("x"),
            json!({"size": -1}),
        ];
        let shown = json!({"options": {}, "state": state()});
        let commands = [
            Command::Stats,
            Command::Slow,
            Command::Show,
            Command::Thaw,
            Command::Resize {
                size: Some(512),
                shrink: false,
            },
            Command::Bitmaps(fathom_requests::BitmapOrder::List),
        ];
        for command in &commands {
            for content in &anything {
                let answer = read_as(command, false, content.clone());
                let text = answer.unwrap_err().text;
                assert!(
                    text.starts_with("disk 'a': the disk's process sent a malformed reply"),
                    "{text}"
                );
            }
        }
        let put = Command::put(table());
        for created in [true, false] {
            let lie = json!({"options": {}, "state": state(), "created": !created});
            let shown = Shown::try_from(read_reply(&put, created, lie).unwrap()).unwrap();
            assert_eq!(shown.created, created);
        }
        assert!(read_as(&Command::Show, false, shown).is_ok());
    }

    #[test]
    fn problems_of_an_image_are_kinds_of_problems() {
        let show = |problems: Value| {
            let mut said = state();
            said["image"] = json!({
                "table_reads": 0, "clusters_allocated": 0, "clusters_freed": 0, "problems": problems
            });
            let content = json!({"options": {}, "state": said});
            read_as(&Command::Show, false, content)
        };
        let shown = show(json!(["leaks", "leaks"])).unwrap();
        assert_eq!(shown["state"]["image"]["problems"], json!(["leaks"]));
        assert!(show(json!(["call 555-0100"])).is_err());
    }

    #[test]
    fn size_is_the_one_that_was_asked_for() {
        let resize = |size, said: u64| {
            let command = Command::Resize {
                size,
                shrink: false,
            };
            read_as(&command, false, json!({"size": said})).is_ok()
        };
        assert!(resize(Some(4096), 4096) && resize(None, 8192));
        assert!(!resize(Some(4096), 1 << 40) && !resize(Some(4096), 512));
    }

    #[test]
    fn tenants_process_is_not_asked_for_another_image() {
        let switch = |to| Command::BeginSwitch {
            to,
            leave_bitmaps: false,
        };
        for command in [
            switch(SwitchTo::Mirror),
            switch(SwitchTo::Layer("/x".into())),
            Command::EndSwitch { go: true },
            Command::BeginBackup {
                id: "1".into(),
                order: Default::default(),
            },
        ] {
            assert!(refuse(&command, "a").is_err(), "{command:?}");
            let answer = read_as(&command, false, json!({"options": {}, "state": state()}));
            assert!(answer.is_err(), "{command:?}");
        }
    }
}
