//! `log`: one line a request.

mod line;
mod writer;

use crate::about::{About, Opt};
use crate::filter::Kind;
use crate::layer::Layer;
use crate::live::View;
use crate::registry::Filters;
use crate::values::Values;
use fathom_core::{Channel, Cx, DiskInfo, Left, Request, RequestId};
use line::{Format, Record};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use writer::{Output, Queue, Writer};

pub(crate) struct Log {
    writer: Writer,
}

#[derive(Clone)]
pub(crate) struct Settings {
    /// None: standard error.
    file: Option<PathBuf>,
    format: Format,
}

impl Settings {
    fn open(&self) -> Result<Output, String> {
        Output::open(self.file.as_deref(), self.format).map_err(|error| {
            let path = self.file.as_deref().unwrap_or("standard error".as_ref());
            format!("log: {}: {error}", path.display())
        })
    }
}

impl Kind for Log {
    const ABOUT: &'static About = &About {
        name: "log",
        what: "one line for each request, with the time it spent in each stage",
        options: &[
            Opt::new(
                "file",
                "FILE",
                "",
                "appended to; without it, standard error",
            ),
            Opt::new(
                "format",
                "line|json",
                "line",
                "for people, or an object a line",
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

    fn new(settings: &Settings, _: &Filters, _: Option<Left>) -> Result<Log, String> {
        let writer = Writer::start(settings.open()?);
        let writer = writer.map_err(|error| format!("log: cannot start its thread: {error}"))?;
        Ok(Log { writer })
    }

    fn changing(&self, to: &Settings) -> Result<(), String> {
        match self.writer.switch(to.open()?) {
            true => Ok(()),
            false => Err("log: nobody reads what was written before".into()),
        }
    }

    fn may_go(_: &Settings) -> Result<(), String> {
        Err("what its filter 'log' has kept would be lost".into())
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
