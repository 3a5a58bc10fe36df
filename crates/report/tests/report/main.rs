//! Tests of reports on runs that are simulated, recorded, damaged or hostile.

mod answers;
mod beside;
mod captures;
mod cells;
mod cells_confirm;
mod cells_html;
mod cells_ranking;
mod damage;
mod device;
mod docs;
mod host_alone;
mod html;
mod html_layers;
mod join;
mod layouts;
mod partial;
mod path;
mod perfetto;
mod profile;
mod remote;
mod render;
mod sheet;
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod two_runs;
