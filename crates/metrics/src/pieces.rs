//! A page on its way, of which there are never more than a few pieces: all of it may be tens of megabytes,
//! and memory that is new costs more than what is written there.

use std::fmt::{self, Write};
use std::mem::replace;

/// So much of it is handed on at once.
pub const PIECE: usize = 64 << 10;

/// Gathers text, and hands it on.
pub struct Pieces<F> {
    piece: String,
    take: F,
}

impl<F: FnMut(Vec<u8>) -> fmt::Result> Pieces<F> {
    pub fn new(take: F) -> Pieces<F> {
        let piece = String::new();
        Pieces { piece, take }
    }

    /// What is no text.
    pub fn take(&mut self, piece: Vec<u8>) -> fmt::Result {
        (self.take)(piece)
    }

    /// There is no more text.
    pub fn end(mut self) -> fmt::Result {
        match self.piece.is_empty() {
            true => Ok(()),
            false => (self.take)(self.piece.into_bytes()),
        }
    }
}

impl<F: FnMut(Vec<u8>) -> fmt::Result> Write for Pieces<F> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.piece.len() + text.len() > self.piece.capacity() {
            let piece = replace(&mut self.piece, String::with_capacity(PIECE));
            if !piece.is_empty() {
                (self.take)(piece.into_bytes())?;
            }
        }
        self.piece.push_str(text);
        Ok(())
    }
}
