//! Metadata contexts: base:allocation, and what servers ask that take disks over.

use super::choose::ALLOCATION_ID;
use super::option::{Fields, TOO_SHORT};
use super::{Handshake, Host, No};
use crate::nbd::connection::CHANGES_ID;
use crate::nbd::export::Export;
use crate::nbd::moving::Ask;
use fathom_nbd::protocol::{
    BASE_ALLOCATION, CHANGES_BEGIN, CHANGES_GO_ON, Replies, is_move_id, opt, rep,
};
use std::sync::Arc;

/// All of the namespace, in a list.
const BASE: &str = "base:";

impl<H: Host> Handshake<'_, H> {
    pub(super) fn list_contexts(&mut self, data: &[u8]) -> Result<(), No> {
        let (_, queries) = self.queries(data)?;
        let asked = |query: &str| [BASE_ALLOCATION, BASE].contains(&query);
        if queries.is_empty() || queries.into_iter().any(asked) {
            // proto.md: ids in a list are 0.
            self.context(opt::LIST_META_CONTEXT, 0);
        }
        Ok(())
    }

    pub(super) fn set_contexts(&mut self, data: &[u8]) -> Result<(), No> {
        // proto.md: what was chosen before is replaced even by what fails.
        self.allocation_of = None;
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
        if queries.contains(&BASE_ALLOCATION) {
            self.allocation_of = Some(export);
            self.context(opt::SET_META_CONTEXT, ALLOCATION_ID);
        }
        Ok(())
    }

    fn context(&mut self, option: u32, id: u32) {
        let parts = [&id.to_be_bytes()[..], BASE_ALLOCATION.as_bytes()];
        self.reply(option, rep::META_CONTEXT, &parts);
    }

    fn queries<'d>(&self, data: &'d [u8]) -> Result<(Arc<Export>, Vec<&'d str>), No> {
        if self.replies == Replies::Simple {
            return Err(No::invalid("structured replies come first"));
        }
        let (name, queries) = parse(data).map_err(No::invalid)?;
        Ok((self.find(name)?, queries))
    }
}

/// What a query asks of changes, and as whom.
fn asked(query: &str) -> Option<(Ask, &str)> {
    let begin = query.strip_prefix(CHANGES_BEGIN).map(|id| (Ask::Begin, id));
    let ask = begin.or_else(|| query.strip_prefix(CHANGES_GO_ON).map(|id| (Ask::GoOn, id)));
    ask.filter(|(_, id)| is_move_id(id))
}

/// An export's name and queries. Those of namespaces that are not known here
/// are for others, whatever they look like.
fn parse(data: &[u8]) -> Result<(&str, Vec<&str>), &'static str> {
    let mut fields = Fields(data);
    let name = fields.string()?;
    let count = fields.u32().ok_or(TOO_SHORT)?;
    // The data's length bounds them: each has four bytes at least.
    let queries = (0..count).map(|_| fields.string());
    let queries = queries.collect::<Result<_, _>>()?;
    match fields.is_empty() {
        true => Ok((name, queries)),
        false => Err("there is more data than queries"),
    }
}
