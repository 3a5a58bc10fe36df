//! Commands from a server that takes over the disk: see `moving.rs`.

use super::check::{Kind, check_range};
use super::intake::Intake;
use super::reply::To;
use super::{CHANGES_ID, NbdSource};
use crate::nbd::moving::Mover;
use fathom_nbd::protocol::{CHANGED, ErrorCode, RequestHeader, command};

impl NbdSource {
    /// Reports changes to this client from now on. The client's block status commands report
    /// nothing else.
    pub fn tell_changes(&mut self, mover: Mover) {
        self.mover = Some(mover);
    }

    /// Answers the commands that only such clients send. Returns false for any other command.
    #[cold]
    pub(super) fn answer_mover(&mut self, header: &RequestHeader, intake: &mut Intake<'_>) -> bool {
        let Some(mover) = &self.mover else {
            return false;
        };
        let to = To {
            cookie: header.cookie,
            offset: header.offset,
        };
        let refused = match header.command {
            // A command with a payload is a filter, which is for other contexts.
            command::BLOCK_STATUS if header.flags == 0 => {
                let kind = Kind::BlockStatus { one: false };
                let end = header.offset.saturating_add(header.len);
                let checked = check_range(&self.export, kind, header.offset, header.len);
                let changed = match checked {
                    Ok(()) => mover
                        .changed(header.offset..end)
                        .map_err(|why| (ErrorCode::Invalid, why)),
                    Err(refusal) => Err((refusal.0, refusal.1)),
                };
                changed.map(|runs| {
                    let flags = |changed| if changed { CHANGED } else { 0 };
                    let runs = runs.into_iter().map(|run| (flags(run.changed), run.len));
                    self.reply().extents(to, CHANGES_ID, runs, true);
                })
            }
            command::TAKE_OVER if header.flags == 0 && header.len == 0 => {
                let taken = mover
                    .take_over()
                    .map_err(|why| (ErrorCode::NotPermitted, why));
                taken.map(|()| self.reply().done(to))
            }
            _ => return false,
        };
        if let Err((code, why)) = refused {
            self.reply().error(to, code, why);
        }
        self.inbox.consume(self.agreed.replies.request_len());
        self.answered_early(intake);
        // Guests wait for the worker meanwhile, so each iteration answers only one such command.
        intake.budget = 0;
        true
    }
}
