//! `log`: writes one line per request.

mod line;
mod writer;

use crate::about::{About, Opt};
use crate::filter::Kind;
use crate::layer::Layer;
use crate::live::View;
use crate::registry::Filters;
use crate::values::Values;
use fathom_core::{Channel, Cx, DiskInfo, PartState, Request, RequestId};
use fathom_files::gate;
use fathom_units::cause;
use line::{Format, Record};
use parking_lot::Mutex;
use serde_json::json;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use writer::{Output, Queue, Writer};

pub(crate) struct Log {
    writer: Writer,
    /// Current destination; none for standard error.
    file: Mutex<Option<(PathBuf, File)>>,
}

#[derive(Clone)]
pub(crate) struct Settings {
    /// None: standard error.
    file: Option<PathBuf>,
    format: Format,
}

impl Settings {
    fn open(&self) -> Result<Option<(PathBuf, File)>, String> {
        let open = |path: &PathBuf| {
            let opened = gate::append(path).map(|file| (path.clone(), file));
            opened.map_err(|error| format!("log: {}: {}", path.display(), cause(error)))
        };
        self.file.as_ref().map(open).transpose()
    }

    fn output(&self, file: Option<&(PathBuf, File)>) -> Result<Output, String> {
        let file = file.map(|(_, file)| file.try_clone()).transpose();
        let file = file.map_err(|error| {
            format!(
                "log: cannot duplicate the file descriptor: {}",
                cause(error)
            )
        })?;
        Ok(Output::new(file, self.format))
    }

    /// Takes over the predecessor's file, if the destination is the same, and the end event of its
    /// writer.
    fn taken(&self, mut left: PartState) -> Result<Option<(Option<File>, OwnedFd)>, String> {
        let path = left.values["file"].as_str().map(PathBuf::from);
        if path != self.file {
            return Ok(None);
        }
        let end = left.take_file()?;
        let file = path.map(|_| left.take_file().map(File::from));
        Ok(Some((file.transpose()?, end)))
    }
}

impl Kind for Log {
    const ABOUT: &'static About = &About {
        name: "log",
        what: "write a line for each request, with its time in each stage",
        options: &[
            Opt::new(
                "file",
                "FILE",
                "",
                "file to append to [default: standard error]",
            ),
            Opt::new(
                "format",
                "line|json",
                "line",
                "text for people, or a JSON object a line",
            ),
        ],
    };

    type Settings = Settings;

    fn parse(values: &Values<'_>) -> Result<Settings, String> {
        Ok(Settings {
            file: values.text("file").map(PathBuf::from),
            format: values.get("format", Format::parse)?,
        })
    }

    fn new(
        settings: &Settings,
        _: &Filters,
        early_state: Option<PartState>,
    ) -> Result<Log, String> {
        let taken = early_state
            .map(|left| settings.taken(left))
            .transpose()?
            .flatten();
        let (file, after) = match taken {
            Some((file, end)) => (settings.file.clone().zip(file), Some(end)),
            None => (settings.open()?, None),
        };
        let writer = Writer::start(settings.output(file.as_ref())?, after);
        let writer =
            writer.map_err(|error| format!("log: cannot start a thread: {}", cause(error)))?;
        let file = Mutex::new(file);
        Ok(Log { writer, file })
    }

    fn changing(&self, to: &Settings) -> Result<(), String> {
        let file = to.open()?;
        let output = to.output(file.as_ref())?;
        match self.writer.switch(output) {
            true => {
                *self.file.lock() = file;
                Ok(())
            }
            false => Err("log: earlier lines are not read".into()),
        }
    }

    /// Lends the file and the end event of this writer. This writer finishes writing its queue,
    /// however long that is, while the successor serves requests. The successor's writer then
    /// writes the lines that it has queued meanwhile.
    fn early_state(&self) -> io::Result<Option<PartState>> {
        let file = self.file.lock();
        let mut files = vec![self.writer.end_event()?];
        if let Some((_, file)) = &*file {
            files.push(file.try_clone()?.into());
        }
        let path = file.as_ref().map(|(path, _)| path.to_string_lossy());
        Ok(Some(PartState {
            values: json!({ "file": path }),
            files,
            is_needed: false,
        }))
    }

    fn end(&self, deadline: Instant) {
        self.writer.end(deadline);
    }

    fn layer(
        self: &Arc<Self>,
        _: View<Settings>,
        cx: &mut Cx,
        _: &DiskInfo,
    ) -> io::Result<Box<dyn Layer>> {
        cx.watch_answers();
        Ok(Box::new(Logging {
            queue: self.writer.queue(),
        }))
    }
}

struct Logging {
    queue: Queue,
}

impl Layer for Logging {
    fn submit(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        below.submit(cx, id);
    }

    fn answered(&mut self, request: &Request) {
        self.queue.put(Record::of(request));
    }
}
