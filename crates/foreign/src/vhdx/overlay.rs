//! A view of a file in which the changes of its log are applied.

use super::journal::Change;
use crate::bytes::Bytes;
use crate::source::Source;
use std::io;

pub struct Overlay<'a> {
    pub source: Source<'a>,
    /// Changes in the order of the log. Later changes override earlier ones.
    pub changes: Vec<Change>,
}

impl Bytes for Overlay<'_> {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        self.source.bytes.read_at(buf, at)?;
        let end = at + buf.len() as u64;
        for change in &self.changes {
            let (from, to) = (at.max(change.at), end.min(change.at + change.len));
            if from >= to {
                continue;
            }
            let part = &mut buf[(from - at) as usize..(to - at) as usize];
            match &change.data {
                Some(data) => {
                    let skip = (from - change.at) as usize;
                    part.copy_from_slice(&data[skip..skip + part.len()]);
                }
                None => part.fill(0),
            }
        }
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.source.len)
    }
}
