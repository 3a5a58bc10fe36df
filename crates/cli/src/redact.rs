//! Removes secrets in addresses and error numbers from the log.

use fathom_units::{cause, redacted};
use std::io::{self, Write};
use tracing_subscriber::fmt::MakeWriter;

/// Removes secrets in addresses and `(os error N)` from lines. Each write must be one line.
pub struct Redacting<M>(pub M);

pub struct Writer<W>(W);

impl<'a, M: MakeWriter<'a>> MakeWriter<'a> for Redacting<M> {
    type Writer = Writer<M::Writer>;

    fn make_writer(&'a self) -> Writer<M::Writer> {
        Writer(self.0.make_writer())
    }
}

impl<W: Write> Write for Writer<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match std::str::from_utf8(line) {
            Ok(text) => self.0.write_all(cause(redacted(text)).as_bytes())?,
            Err(_) => self.0.write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
