//! What a report looks like: each renderer turns [`Analysis`](crate::analysis::Analysis) values
//! into text or bytes. The same analyses give the same bytes.

pub mod csv;
pub mod html;
pub mod json;
mod names;
pub mod perfetto;
pub mod terminal;
mod text;
