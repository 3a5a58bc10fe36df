//! Renderers: each turns [`Analysis`](crate::analysis::Analysis) values into text or bytes. The
//! same analyses give the same bytes.

pub mod answer;
pub(crate) mod comparison;
pub mod csv;
pub(crate) mod facts;
pub mod html;
pub mod json;
pub(crate) mod layout;
mod names;
pub mod perfetto;
pub mod terminal;
pub(crate) mod text;
pub(crate) mod verdict;
