//! Metadata contexts: base:allocation, dirty bitmaps, and the changes for a server that takes over
//! a disk.

use super::option::{Fields, TOO_SHORT};
use super::{Handshake, Host, No};
use crate::nbd::connection::CHANGES_ID;
use crate::nbd::export::Export;
use crate::nbd::moving::Ask;
use fathom_nbd::protocol::{
    BASE_ALLOCATION, CHANGES_BEGIN, CHANGES_GO_ON, DIRTY_BITMAP, Replies, is_move_id, opt, rep,
};
use std::sync::Arc;

/// Queries that list all contexts of a namespace.
const BASE: &str = "base:";
const QEMU: &str = "qemu:";

/// Ids of contexts; the numbers are arbitrary.
pub const ALLOCATION_ID: u32 = 1;
pub const BITMAP_ID: u32 = 3;

/// The contexts that block status reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contexts {
    pub allocation: bool,
    pub bitmap: bool,
}

impl<H: Host> Handshake<'_, H> {
    pub(super) fn list_contexts(&mut self, data: &[u8]) -> Result<(), No> {
        let (export, queries) = self.queries(data)?;
        let is_asked =
            |of: &[&str]| queries.is_empty() || queries.iter().any(|query| of.contains(query));
        // proto.md: ids in a list are 0.
        if is_asked(&[BASE_ALLOCATION, BASE]) {
            self.context(opt::LIST_META_CONTEXT, 0, BASE_ALLOCATION);
        }
        if let Some(name) = bitmap_of(&export)
            && is_asked(&[&name, DIRTY_BITMAP, QEMU])
        {
            self.context(opt::LIST_META_CONTEXT, 0, &name);
        }
        Ok(())
    }

    pub(super) fn set_contexts(&mut self, data: &[u8]) -> Result<(), No> {
        // proto.md: even a failed request discards the earlier selection.
        self.chosen = None;
        self.changes_of = None;
        let (export, queries) = self.queries(data)?;
        if let [query] = queries[..]
            && let Some((ask, id)) = asked(query)
            && export.moving().is_some()
        {
            self.changes_of = Some((export, ask, id.to_owned()));
            let parts = [&CHANGES_ID.to_be_bytes()[..], query.as_bytes()];
            self.reply(opt::SET_META_CONTEXT, rep::META_CONTEXT, &parts);
            return Ok(());
        }
        let bitmap = bitmap_of(&export).filter(|name| queries.contains(&name.as_str()));
        let contexts = Contexts {
            allocation: queries.contains(&BASE_ALLOCATION),
            bitmap: bitmap.is_some(),
        };
        if contexts.allocation {
            self.context(opt::SET_META_CONTEXT, ALLOCATION_ID, BASE_ALLOCATION);
        }
        if let Some(name) = bitmap {
            self.context(opt::SET_META_CONTEXT, BITMAP_ID, &name);
        }
        self.chosen = (contexts != Contexts::default()).then_some((export, contexts));
        Ok(())
    }

    fn context(&mut self, option: u32, id: u32, name: &str) {
        let parts = [&id.to_be_bytes()[..], name.as_bytes()];
        self.reply(option, rep::META_CONTEXT, &parts);
    }

    fn queries<'d>(&self, data: &'d [u8]) -> Result<(Arc<Export>, Vec<&'d str>), No> {
        if self.replies == Replies::Simple {
            return Err(No::invalid("structured replies must be negotiated first"));
        }
        let (name, queries) = parse(data).map_err(No::invalid)?;
        Ok((self.find(name)?, queries))
    }
}

/// Returns the name of the dirty-bitmap context, if the export has a bitmap.
fn bitmap_of(export: &Export) -> Option<String> {
    let name = export.bitmap()?;
    Some(format!("{DIRTY_BITMAP}{name}"))
}

/// Parses a query for changes: returns the kind of query and the client's id.
fn asked(query: &str) -> Option<(Ask, &str)> {
    let begin = query.strip_prefix(CHANGES_BEGIN).map(|id| (Ask::Begin, id));
    let ask = begin.or_else(|| query.strip_prefix(CHANGES_GO_ON).map(|id| (Ask::GoOn, id)));
    ask.filter(|(_, id)| is_move_id(id))
}

/// Parses an export name and its queries. Queries of unknown namespaces are not checked.
fn parse(data: &[u8]) -> Result<(&str, Vec<&str>), &'static str> {
    let mut fields = Fields(data);
    let name = fields.string()?;
    let count = fields.u32().ok_or(TOO_SHORT)?;
    // The length of the data bounds the number of queries: each has at least four bytes.
    let queries = (0..count).map(|_| fields.string());
    let queries = queries.collect::<Result<_, _>>()?;
    match fields.is_empty() {
        true => Ok((name, queries)),
        false => Err("more data than queries"),
    }
}
