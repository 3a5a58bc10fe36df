//! Options that choose an export: EXPORT_NAME, INFO and GO.

use super::context::{ALLOCATION_ID, BITMAP_ID, Contexts};
use super::option::{Fields, TOO_SHORT, parse_string};
use super::{Agreement, Failure, Handshake, Host, Next, No, refused};
use crate::nbd::connection::{Agreed, ExportView, Limits};
use crate::nbd::export::{Export, InUse};
use crate::nbd::moving::Mover;
use fathom_nbd::protocol::{
    BlockSizes, ExportInfo, MAX_STRING, Replies, export_flag, info, opt, rep,
};
use std::io::Read;
use std::sync::Arc;

/// Parsed data of INFO and GO.
struct Choice<'a> {
    name: &'a str,
    wants_name: bool,
    wants_description: bool,
}

impl<H: Host> Handshake<'_, H> {
    /// Handles EXPORT_NAME. The reply describes the export; on an error the connection ends.
    pub(super) fn export_name(&mut self, len: u32) -> Result<Next, Failure> {
        if len as usize > MAX_STRING {
            return Err(refused(format!("an export name of {len} bytes")));
        }
        let mut name = vec![0; len as usize];
        self.transport.read_exact(&mut name)?;
        let name = parse_string(&name).map_err(refused)?;
        if self.lacks_tls() {
            return Err(refused(
                "the client does not use TLS, which this server requires",
            ));
        }
        if self.replies == Replies::Extended {
            return Err(refused("NBD_OPT_EXPORT_NAME after extended headers"));
        }
        let export = self.find(name).map_err(|No(_, why)| refused(why))?;
        let in_use = self.host.admit(&export);
        let in_use = in_use.map_err(|denied| refused(denied.to_string()))?;
        let view = export.view();
        self.out.extend_from_slice(&view.size.to_be_bytes());
        let flags = self.flags(&export, &view);
        self.out.extend_from_slice(&flags.to_be_bytes());
        if !self.no_zeroes {
            self.out.extend_from_slice(&[0; 124]);
        }
        Ok(self.agree(in_use, None, view))
    }

    /// Handles INFO and GO. GO also ends the handshake.
    pub(super) fn choose(&mut self, option: u32, data: &[u8]) -> Result<Next, No> {
        let choice = Choice::parse(data).map_err(No::invalid)?;
        let export = self.find(choice.name)?;
        let chosen = match option {
            opt::GO => {
                let mover = self.mover(&export)?;
                Some((self.host.admit(&export)?, mover))
            }
            _ => None,
        };
        let view = export.view();
        self.describe(option, &choice, &export, &view);
        self.reply(option, rep::ACK, &[]);
        Ok(match chosen {
            Some((in_use, mover)) => self.agree(in_use, mover, view),
            None => Next::Option,
        })
    }

    /// Returns the mover, if the client has asked for the export's changes.
    fn mover(&mut self, export: &Arc<Export>) -> Result<Option<Mover>, No> {
        let asked = self.changes_of.take();
        let asked = asked.filter(|(of, ..)| Arc::ptr_eq(of, export));
        let Some(((_, ask, id), moving)) = asked.zip(export.moving()) else {
            return Ok(None);
        };
        let mover = moving.ask(ask, &id);
        mover.map(Some).map_err(|why| No(rep::ERR_POLICY, why))
    }

    fn describe(
        &mut self,
        option: u32,
        choice: &Choice<'_>,
        export: &Arc<Export>,
        view: &ExportView,
    ) {
        let info = ExportInfo {
            size: view.size,
            flags: self.flags(export, view),
        };
        self.reply(option, rep::INFO, &[&info.to_bytes()]);
        // Block sizes are sent in any case, for clients that use them without asking.
        let blocks = BlockSizes {
            minimum: view.minimum_block,
            preferred: view.preferred_block,
            maximum: Limits::MAX_PAYLOAD,
        };
        self.reply(option, rep::INFO, &[&blocks.to_bytes()]);
        if choice.wants_name {
            self.tell(option, info::NAME, export.name());
        }
        if choice.wants_description && !export.description().is_empty() {
            self.tell(option, info::DESCRIPTION, export.description());
        }
    }

    fn tell(&mut self, option: u32, kind: u16, text: &str) {
        let parts = [&kind.to_be_bytes()[..], text.as_bytes()];
        self.reply(option, rep::INFO, &parts);
    }

    fn agree(&mut self, in_use: InUse, mover: Option<Mover>, view: ExportView) -> Next {
        let contexts = self.contexts(in_use.export());
        let agreed = Agreed {
            replies: self.replies,
            allocation_context: contexts.allocation.then_some(ALLOCATION_ID),
            bitmap_context: contexts.bitmap.then_some(BITMAP_ID),
        };
        Next::Agreed(Box::new(Agreement {
            mover,
            in_use,
            agreed,
            view,
        }))
    }

    /// Returns the contexts that were selected for this export (proto.md, "Metadata querying").
    fn contexts(&self, export: &Arc<Export>) -> Contexts {
        let chosen = self.chosen.as_ref();
        let of_this = chosen.filter(|(chosen, _)| Arc::ptr_eq(chosen, export));
        of_this.map_or_else(Contexts::default, |(_, contexts)| *contexts)
    }

    /// Returns the transmission flags.
    fn flags(&self, export: &Arc<Export>, view: &ExportView) -> u16 {
        let flags = view.flags(self.replies);
        match self.contexts(export) {
            Contexts {
                allocation: true,
                bitmap: false,
            } => flags,
            // A filter is useful only with several contexts, but the server supports it with this
            // one only.
            _ => flags & !export_flag::BLOCK_STATUS_PAYLOAD,
        }
    }

    pub(super) fn find(&self, name: &str) -> Result<Arc<Export>, No> {
        let found = self.host.exports().find(name);
        found.ok_or_else(|| {
            // Only as much of the name as a log line should have.
            let shown: String = name.chars().take(80).collect();
            No(rep::ERR_UNKNOWN, format!("no export {shown:?}"))
        })
    }
}

impl Choice<'_> {
    fn parse(data: &[u8]) -> Result<Choice<'_>, &'static str> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = fields.u16().ok_or(TOO_SHORT)?;
        let mut choice = Choice {
            name,
            wants_name: false,
            wants_description: false,
        };
        for _ in 0..count {
            match fields.u16().ok_or(TOO_SHORT)? {
                info::NAME => choice.wants_name = true,
                info::DESCRIPTION => choice.wants_description = true,
                // proto.md: unknown requests are ignored, and NBD_INFO_EXPORT is always sent.
                _ => {}
            }
        }
        match fields.is_empty() {
            true => Ok(choice),
            false => Err("more data than information requests"),
        }
    }
}
