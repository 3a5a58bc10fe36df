//! The slices of one request. The whole request and the guest's layers are on the guest's track;
//! the other layers are on the host's tracks.

use super::lanes::{Lane, Side};
use super::trace::{Flow, Trace, Value};
use crate::analysis::{Group, Layer, Point};
use crate::join::way::Way;
use crate::render::names;
use crate::render::text::size;

/// Returns the side on which a layer is drawn.
fn side(layer: Layer) -> Side {
    match layer {
        Layer::ServerWake | Layer::ServerNotify => Side::Server,
        _ => match layer.describe().1 {
            Group::Guest | Group::Unattributed => Side::Guest,
            Group::Switching | Group::ServerSwitching | Group::Device => Side::Kvm,
            Group::Server => Side::Server,
            Group::HostIo | Group::Network => Side::HostIo,
            Group::RemoteServer | Group::RemoteIo => Side::Remote,
        },
    }
}

/// Draws a request, and returns the end of its last slice.
///
/// Effects that were seen before their causes would give slices of negative length, or slices that
/// do not nest. Therefore a slice never begins before the previous one on its track has ended. A
/// slice that would end before it begins becomes an instant with its negative length.
pub(super) fn draw(trace: &mut Trace, lane: &mut Lane, way: &Way, id: u64, round: &str) -> i64 {
    let (start, total) = way.extent();
    let guest = lane.tracks[Side::Guest as usize];
    let name = match way.key.length {
        0 => way.key.class.name().to_owned(),
        length => format!("{} {}", way.key.class.name(), size(length)),
    };
    trace.slice(guest, start, &name, Flow::None, &said(way, total, round));
    lane.ends[Side::Guest as usize] = start;
    let points: Vec<(Point, i64)> = way.points.seen().collect();
    for (pair, (layer, time)) in points.windows(2).zip(way.layers()) {
        let flow = flow(pair[0].0, pair[1].0, id);
        piece(trace, lane, layer, (pair[0].1, pair[1].1), time, flow);
    }
    let last = lane.ends[Side::Guest as usize].max(start + total);
    trace.end(guest, last);
    lane.ends[Side::Guest as usize] = last;
    last.max(lane.ends.iter().copied().max().unwrap_or(last))
}

/// Returns the part of the arrow for a slice. The arrow leads from the slice that ends with the
/// kick, through the host's slices, to the slice that begins with the guest's handler.
fn flow(from: Point, to: Point, id: u64) -> Flow {
    if to < Point::Kick || from > Point::Handler {
        Flow::None
    } else if to > Point::Handler {
        Flow::End(id)
    } else {
        Flow::Through(id)
    }
}

fn piece(
    trace: &mut Trace,
    lane: &mut Lane,
    layer: Layer,
    (from, to): (i64, i64),
    time: i64,
    flow: Flow,
) {
    let side = side(layer) as usize;
    let (track, name) = (lane.tracks[side], layer.describe().0);
    let begin = from.max(lane.ends[side]);
    if to < begin {
        let said = [("ns", Value::Int(time))];
        trace.instant(track, begin, &format!("{name}: out of order"), &said);
        lane.ends[side] = begin;
        return;
    }
    trace.slice(track, begin, name, flow, &[]);
    trace.end(track, to);
    lane.ends[side] = to;
}

fn said<'a>(way: &Way, total: i64, round: &'a str) -> Vec<(&'static str, Value<'a>)> {
    let mut said = vec![
        ("number", Value::Uint(way.number)),
        ("round", Value::Text(round)),
        ("offset", Value::Uint(way.key.offset)),
        ("length", Value::Uint(way.key.length)),
        ("total ns", Value::Int(total)),
        ("delivery", Value::Text(names::delivery(way.delivery))),
        ("batch", Value::Uint(u64::from(way.batch))),
        ("host I/O", Value::Text(names::host(way.host))),
    ];
    if way.ambiguous {
        said.push(("ambiguous", Value::Text("more than one counterpart")));
    }
    if way.incomplete {
        said.push(("incomplete", Value::Text("lacks an event that others have")));
    }
    said
}
