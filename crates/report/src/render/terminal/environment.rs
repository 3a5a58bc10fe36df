//! The facts of a run: its verdict and its setup.

use super::page::Page;
use crate::analysis::Analysis;
use crate::render::facts;
use crate::render::text::{date, duration};
use crate::render::verdict::{self, Piece};

pub(super) fn show(page: &mut Page, analysis: &Analysis) {
    page.heading(&analysis.title);
    if let Some(pieces) = verdict::sentence(analysis, duration) {
        let told = pieces.into_iter().map(|piece| match piece {
            Piece::Text(text) => text,
            Piece::Layer(layer) => format!("'{}'", layer.describe().0),
        });
        page.fact("verdict", &told.collect::<String>());
    }
    page.fact("recorded", &date(analysis.created));
    for (name, words) in facts::environment(analysis) {
        page.fact(name, &words);
    }
    if analysis.environment.stretched {
        page.warning(facts::STRETCHED);
    }
}
