//! The data of the page's charts: the part of an analysis that charts show, with names for the
//! reader.

use std::collections::HashMap;

use serde::Serialize;

use super::words::{group_key, layer_key, plural, point_name, thread_short};
use super::{Named, header};
use crate::analysis::{
    Analysis, Distribution, Exact, Group, HeatMap, Joined, Layer, LayerRow, Wiki,
};
use crate::render::comparison::letter;
use crate::render::names;
use crate::render::verdict::untraced;

#[derive(Debug, Serialize)]
pub(super) struct Data<'a> {
    runs: Vec<RunData<'a>>,
    /// All layers that any of the runs has, in the order of a request's path.
    layers: Vec<LayerName>,
    groups: Vec<GroupName>,
}

/// A layer's names; `key` is its name in palette.css. Gaps are hatched.
#[derive(Debug, Serialize)]
struct LayerName {
    key: String,
    name: &'static str,
    gap: bool,
    group: String,
}

#[derive(Debug, Serialize)]
struct GroupName {
    key: String,
    name: &'static str,
}

#[derive(Debug, Serialize)]
struct RunData<'a> {
    letter: String,
    name: &'a str,
    bars: Bars,
    curves: Vec<Curve<'a>>,
    heat: Option<&'a HeatMap>,
    slowest: Vec<Request>,
    /// (key, ns) of a request around the median.
    middle: Vec<(String, f64)>,
    lines: Lines,
}

/// Bars with a common scale, bars that are compared by shares, and bars that show how the slowest
/// requests exceed an ordinary one.
#[derive(Debug, Serialize)]
struct Bars {
    time: Vec<Bar>,
    share: Vec<Bar>,
    excess: Vec<Bar>,
}

/// A stacked bar.
#[derive(Debug, Serialize)]
struct Bar {
    label: String,
    note: String,
    total: f64,
    /// By how much the bar exceeds the time of the host alone.
    against: Option<String>,
    segments: Vec<Segment>,
}

#[derive(Debug, Serialize)]
struct Segment {
    /// A layer's key. None: the segment has the group's name and colour.
    layer: Option<String>,
    group: Option<String>,
    name: String,
    ns: f64,
    /// No point within the segment was traced.
    untraced: bool,
}

/// A distribution's curve; the curve of the total has no layer.
#[derive(Debug, Serialize)]
struct Curve<'a> {
    layer: Option<String>,
    name: &'static str,
    mean: f64,
    time: &'a Distribution,
}

#[derive(Debug, Serialize)]
struct Request {
    number: u64,
    operation: &'static str,
    offset: u64,
    length: u64,
    total: i64,
    delivery: &'static str,
    batch: u32,
    host: &'static str,
    /// (key, ns)
    layers: Vec<(String, i64)>,
    points: Vec<(String, i64)>,
}

#[derive(Debug, Serialize)]
struct Lines {
    /// The activities of threads; spans refer to them by index.
    what: Vec<String>,
    threads: Vec<LineData>,
    /// (start, duration) of the request that the lines show, in ns.
    request: Option<(i64, i64)>,
}

#[derive(Debug, Serialize)]
struct LineData {
    name: String,
    /// (start, length, index of the activity)
    spans: Vec<(i64, i64, usize)>,
}

pub(super) fn of<'a>(runs: &'a [Named]) -> Data<'a> {
    let rows = || {
        let all = runs.iter().filter_map(|(_, run)| run.exact.as_ref());
        all.flat_map(|exact| &exact.layers)
    };
    let layers: Vec<Layer> = Layer::ALL
        .iter()
        .copied()
        .filter(|&layer| rows().any(|row| row.layer == layer))
        .collect();
    Data {
        runs: (0..).zip(runs).map(run_data).collect(),
        layers: layers
            .iter()
            .map(|&layer| layer_name(runs, layer))
            .collect(),
        groups: GROUPS.iter().map(|&group| group_name(group)).collect(),
    }
}

/// All groups, in the order of legends.
const GROUPS: &[Group] = &[
    Group::Guest,
    Group::Switching,
    Group::ServerSwitching,
    Group::Server,
    Group::Network,
    Group::RemoteServer,
    Group::RemoteIo,
    Group::HostIo,
    Group::Device,
    Group::Unattributed,
];

/// Returns whether a layer is a gap in any of the runs.
pub(super) fn is_gap(runs: &[Named], layer: Layer) -> bool {
    let mut exact = runs.iter().filter_map(|(_, run)| run.exact.as_ref());
    exact.any(|exact| exact.is_gap(layer))
}

fn layer_name(runs: &[Named], layer: Layer) -> LayerName {
    let gap = is_gap(runs, layer);
    LayerName {
        key: layer_key(layer),
        name: layer.name(gap),
        gap,
        group: group_key(layer.describe().1),
    }
}

fn group_name(group: Group) -> GroupName {
    GroupName {
        key: group_key(group),
        name: names::group(group),
    }
}

fn run_data((number, (name, run)): (usize, &Named)) -> RunData<'_> {
    let exact = run.exact.as_ref();
    RunData {
        letter: letter(number),
        name,
        bars: bars(run),
        curves: exact.map(curves).unwrap_or_default(),
        heat: exact.map(|exact| &exact.heat),
        slowest: exact.map_or(Vec::new(), |exact| {
            exact.slowest.iter().map(request).collect()
        }),
        middle: exact.map(middle).unwrap_or_default(),
        lines: lines(run),
    }
}

/// Returns the bars of a run: the wiki's two diagrams in one. The bars show the guest's time in
/// layers, from both kinds of arithmetic, and the time of the host alone for the same call. Bars of
/// the slowest requests would be much longer, and are therefore compared by shares.
fn bars(run: &Analysis) -> Bars {
    let exact = run.exact.as_ref().filter(|exact| exact.total.count > 0);
    let mean = |exact: &Exact| {
        let note = format!("{} followed", plural(exact.total.count, "request"));
        let label = if header::saw_guest(exact) {
            "Guest, traced"
        } else {
            "From the host alone"
        };
        exact_bar(exact, label, &note, |row| Some(row.time.mean))
    };
    let tail = |exact: &Exact| {
        let told = exact.layers.iter().any(|row| row.tail_mean.is_some());
        let of: fn(&LayerRow) -> Option<f64> = |row| row.tail_mean;
        told.then(|| exact_bar(exact, "Slowest 1%", "mean of these", of))
    };
    let all = exact.map(|exact| Bar {
        label: "All requests".to_owned(),
        note: "mean".to_owned(),
        ..mean(exact)
    });
    let mut time: Vec<Bar> = exact.map(mean).into_iter().collect();
    time.extend(run.wiki.as_ref().and_then(wiki_bar));
    let host = plain(run, true, "Host alone", "the same benchmark");
    let mut guest = plain(run, false, "Guest, untraced", "the benchmark's figure");
    for (call, bar) in &mut guest {
        let same = host.iter().find(|(host, _)| host == call);
        bar.against = same.map(|(_, host)| against(bar.total, host.total));
    }
    time.extend(guest.into_iter().chain(host).map(|(_, bar)| bar));
    Bars {
        time,
        share: all.into_iter().chain(exact.and_then(tail)).collect(),
        excess: exact.map(excess).unwrap_or_default(),
    }
}

/// Returns bars with a common scale: a median request, one of the slowest, and the difference.
fn excess(exact: &Exact) -> Vec<Bar> {
    let told = |row: &LayerRow| row.tail_mean.is_some() && row.middle_mean.is_some();
    if !exact.layers.iter().any(told) {
        return Vec::new();
    }
    vec![
        exact_bar(exact, "Median request", "mean of the middle tenth", |row| {
            row.middle_mean
        }),
        exact_bar(exact, "Slowest 1%", "mean of these", |row| row.tail_mean),
        exact_bar(exact, "The difference", "where it comes from", above_median),
    ]
}

/// Returns how much longer a layer takes in the slowest requests than in an ordinary one.
pub(super) fn above_median(row: &LayerRow) -> Option<f64> {
    Some(row.tail_mean? - row.middle_mean?)
}

/// Compares the guest with the host: `+33% over the host`, or `7.4 times the host's`.
fn against(guest: f64, host: f64) -> String {
    let ratio = guest / host.max(1.0);
    if ratio < 2.0 {
        format!("{:+.0}% over the host", (ratio - 1.0) * 100.0)
    } else {
        format!("{ratio:.1} times the host\u{2019}s")
    }
}

fn exact_bar(exact: &Exact, label: &str, note: &str, of: fn(&LayerRow) -> Option<f64>) -> Bar {
    let segments = exact.layers.iter().filter_map(|row| {
        Some(Segment {
            layer: Some(layer_key(row.layer)),
            group: Some(group_key(row.group)),
            name: row.name.to_owned(),
            ns: of(row)?,
            untraced: exact.is_gap(row.layer),
        })
    });
    bar(label, note, segments.collect())
}

fn bar(label: &str, note: &str, segments: Vec<Segment>) -> Bar {
    Bar {
        label: label.to_owned(),
        note: note.to_owned(),
        total: segments.iter().map(|segment| segment.ns).sum(),
        against: None,
        segments,
    }
}

fn wiki_bar(wiki: &Wiki) -> Option<Bar> {
    let segments = wiki.delta.iter().map(|(name, ns, _)| Segment {
        layer: None,
        group: Some(group_key(wiki_group(name))),
        name: name.clone(),
        ns: *ns,
        untraced: false,
    });
    let segments: Vec<Segment> = segments.collect();
    let note = "means subtracted";
    (!segments.is_empty()).then(|| bar("The wiki's way", note, segments))
}

/// Returns the group of a row of the wiki's table. Rows that could not be separated form one row,
/// `A + B`, which has the group of the first.
pub(super) fn wiki_group(name: &str) -> Group {
    match name.split(" + ").next().unwrap_or(name) {
        "Guest" => Group::Guest,
        "Host I/O" => Group::HostIo,
        "Host/guest switching" => Group::Switching,
        name if name.starts_with("Host/") => Group::ServerSwitching,
        _ => Group::Server,
    }
}

/// Returns bars of the untraced rounds, one for each call that the benchmark used.
fn plain<'a>(run: &'a Analysis, on_host: bool, label: &str, note: &str) -> Vec<(&'a str, Bar)> {
    let one = |(call, ns)| {
        let segment = Segment {
            layer: None,
            group: on_host.then(|| group_key(Group::HostIo)),
            name: format!("{call}() as a whole"),
            ns,
            untraced: true,
        };
        let label = format!("{label}, {call}()");
        (call, bar(&label, note, vec![segment]))
    };
    untraced(run, on_host).into_iter().map(one).collect()
}

/// Returns the curves of the total and of each layer that took time.
fn curves(exact: &Exact) -> Vec<Curve<'_>> {
    let total = Curve {
        layer: None,
        name: "total",
        mean: exact.total.mean,
        time: &exact.total,
    };
    let spent = exact.layers.iter().filter(|row| row.time.max > 0);
    let layers = spent.map(|row| Curve {
        layer: Some(layer_key(row.layer)),
        name: row.name,
        mean: row.time.mean,
        time: &row.time,
    });
    std::iter::once(total).chain(layers).collect()
}

fn request(joined: &Joined) -> Request {
    let layers = joined.layers.iter();
    let points = joined.points.iter();
    Request {
        number: joined.number,
        operation: joined.operation,
        offset: joined.offset,
        length: joined.length,
        total: joined.total,
        delivery: names::delivery(joined.delivery),
        batch: joined.batch,
        host: names::host(joined.host),
        layers: layers.map(|&(layer, ns)| (layer_key(layer), ns)).collect(),
        points: points.map(|&(point, at)| (point_name(point), at)).collect(),
    }
}

fn middle(exact: &Exact) -> Vec<(String, f64)> {
    let rows = exact.layers.iter();
    rows.filter_map(|row| Some((layer_key(row.layer), row.middle_mean?)))
        .collect()
}

fn lines(run: &Analysis) -> Lines {
    let mut what: Vec<String> = Vec::new();
    let mut index: HashMap<&str, usize> = HashMap::new();
    let mut threads = Vec::new();
    for line in run.time_lines.iter().filter(|line| !line.spans.is_empty()) {
        let mut spans = Vec::with_capacity(line.spans.len());
        for (start, end, name) in &line.spans {
            let known = *index.entry(name).or_insert_with(|| {
                what.push(name.clone());
                what.len() - 1
            });
            spans.push((*start, end - start, known));
        }
        threads.push(LineData {
            name: thread_short(&line.thread),
            spans,
        });
    }
    let request = run.picture.as_ref().and_then(|p| p.request.as_ref());
    Lines {
        what,
        threads,
        request: request.map(|request| (request.start, request.total)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wikis_rows_have_the_groups_colours() {
        let cases = [
            ("Guest", Group::Guest),
            ("Host/guest switching", Group::Switching),
            ("Host/QEMU switching", Group::ServerSwitching),
            ("Fathom", Group::Server),
            ("Host I/O", Group::HostIo),
            (
                "Host/guest switching + Host/Fathom switching",
                Group::Switching,
            ),
        ];
        for (name, group) in cases {
            assert_eq!(wiki_group(name), group, "{name}");
        }
    }
}
