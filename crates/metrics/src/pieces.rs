//! Hands a page on in pieces, a few of which exist at a time.
//!
//! A page may have tens of megabytes, and new memory costs more than writing the text.

use std::fmt::{self, Write};
use std::mem::replace;

/// Size of a piece in bytes.
pub const PIECE: usize = 64 << 10;

/// Collects text and hands it on in pieces.
pub struct Pieces<F> {
    piece: String,
    take: F,
}

impl<F: FnMut(Vec<u8>) -> fmt::Result> Pieces<F> {
    pub fn new(take: F) -> Pieces<F> {
        let piece = String::new();
        Pieces { piece, take }
    }

    /// Hands on binary data.
    pub fn take(&mut self, piece: Vec<u8>) -> fmt::Result {
        (self.take)(piece)
    }

    /// Hands on the last piece.
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
