//! A request's path as a picture. The path leads down from the guest's application to the device on
//! the left, and back up on the right. Each layer is at the station where its time is spent.

use std::ops::RangeInclusive;

use super::layers::Place;
use super::markup::Html;
use super::words::{duration, layer_colour, layer_key};
use crate::analysis::{Analysis, Exact, Layer, LayerRow};
use crate::render::text::percent;

/// A station: its owner, its name, and the collectors that watch it.
struct Station {
    whose: &'static str,
    name: &'static str,
    watched_by: &'static [&'static str],
}

const BLOCK: usize = 0;
const DRIVER: usize = 1;
const KVM: usize = 2;
const QUEUE: usize = 3;
const WORKER: usize = 4;
const HOST: usize = 5;
const DEVICE: usize = 6;

const fn station(
    whose: &'static str,
    name: &'static str,
    watched_by: &'static [&'static str],
) -> Station {
    Station {
        whose,
        name,
        watched_by,
    }
}

const SERVER: &[&str] = &["fathom", "io-calls"];

const STATIONS: [Station; 7] = [
    station("guest", "block layer", &["guest"]),
    station("guest", "virtio driver", &["guest"]),
    station("host", "KVM", &["kvm"]),
    station("server", "queue", SERVER),
    station("server", "worker", SERVER),
    station("host", "block layer", &["block"]),
    station("host", "device", &["block"]),
];

/// The last two stations of a run whose requests are sent to another host.
const REMOTE: [Station; 2] = [
    station("between hosts", "network", &["remote"]),
    station("remote host", "server and its I/O", &["remote"]),
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    Down,
    Up,
    /// At the device, where the path turns around.
    Both,
}

impl Side {
    fn class(self) -> &'static str {
        match self {
            Side::Down => "down",
            Side::Up => "up",
            Side::Both => "both",
        }
    }
}

/// Returns the stations where a layer's time is spent. Returns None for unattributed time.
fn place(layer: Layer) -> Option<(RangeInclusive<usize>, Side)> {
    Some(match layer {
        Layer::GuestSubmit => (BLOCK..=BLOCK, Side::Down),
        Layer::GuestBatch => (DRIVER..=DRIVER, Side::Down),
        Layer::KickExit | Layer::KickKvm | Layer::KickPath => (KVM..=KVM, Side::Down),
        Layer::ServerWake | Layer::ServerPop => (QUEUE..=QUEUE, Side::Down),
        Layer::ServerQueue | Layer::ServerMap => (WORKER..=WORKER, Side::Down),
        // In a run with a remote server, the last two stations are the network and that server.
        Layer::NetworkOut => (HOST..=HOST, Side::Down),
        Layer::RemotePop
        | Layer::RemoteQueue
        | Layer::RemoteMap
        | Layer::RemoteDevice
        | Layer::RemoteAnswer => (DEVICE..=DEVICE, Side::Both),
        Layer::NetworkBack => (HOST..=HOST, Side::Up),
        Layer::ServerTake => (QUEUE..=WORKER, Side::Down),
        Layer::ServerIn => (QUEUE..=HOST, Side::Down),
        Layer::HostSubmit => (HOST..=HOST, Side::Down),
        Layer::HostDevice => (DEVICE..=DEVICE, Side::Both),
        Layer::HostIo => (HOST..=DEVICE, Side::Both),
        Layer::HostReap => (HOST..=HOST, Side::Up),
        Layer::ServerOut => (QUEUE..=HOST, Side::Up),
        Layer::ServerAnswer => (QUEUE..=WORKER, Side::Up),
        Layer::ServerFinish => (WORKER..=WORKER, Side::Up),
        Layer::ServerNotify => (QUEUE..=QUEUE, Side::Up),
        Layer::VcpuWake | Layer::VcpuSchedule | Layer::VcpuEnter | Layer::InterruptEntry => {
            (KVM..=KVM, Side::Up)
        }
        Layer::InterruptPath => (KVM..=QUEUE, Side::Up),
        Layer::GuestDevice => (KVM..=DEVICE, Side::Both),
        Layer::GuestBottomHalf => (DRIVER..=DRIVER, Side::Up),
        Layer::GuestReturn => (BLOCK..=BLOCK, Side::Up),
        Layer::Unattributed => return None,
    })
}

/// A field of the picture: stations on a side, and their layers in the order of the path.
#[derive(Clone, Debug, PartialEq)]
struct Field {
    stations: RangeInclusive<usize>,
    side: Side,
    layers: Vec<Layer>,
}

impl Field {
    fn meets(&self, station: usize, side: Side) -> bool {
        let same = self.side == side || self.side == Side::Both || side == Side::Both;
        same && self.stations.contains(&station)
    }
}

/// Returns the fields of a run's layers. A layer that spans several stations gets all of them if
/// they are free. Otherwise it gets the first free one, or joins the layers of its first station.
fn fields(layers: &[Layer]) -> Vec<Field> {
    let placed = layers
        .iter()
        .filter_map(|&layer| Some((layer, place(layer)?)));
    let mut placed: Vec<_> = placed.collect();
    placed.sort_by_key(|(_, (stations, _))| stations.end() - stations.start());
    let mut fields: Vec<Field> = Vec::new();
    for (layer, (mut stations, side)) in placed {
        let is_free = |&at: &usize| !fields.iter().any(|field| field.meets(at, side));
        if !stations.clone().all(|at| is_free(&at)) {
            let at = stations.clone().find(is_free).unwrap_or(*stations.start());
            stations = at..=at;
        }
        let at = *stations.start();
        match fields.iter_mut().find(|field| field.meets(at, side)) {
            Some(field) => field.layers.push(layer),
            None => fields.push(Field {
                stations,
                side,
                layers: vec![layer],
            }),
        }
    }
    for field in &mut fields {
        field.layers.sort();
    }
    fields
}

/// Returns the fields without a layer.
fn empty(fields: &[Field]) -> Vec<Field> {
    let all = (0..STATIONS.len()).flat_map(|at| match at {
        DEVICE => vec![(at, Side::Both)],
        at => vec![(at, Side::Down), (at, Side::Up)],
    });
    let free = all.filter(|&(at, side)| !fields.iter().any(|field| field.meets(at, side)));
    let field = |(at, side)| Field {
        stations: at..=at,
        side,
        layers: Vec::new(),
    };
    free.map(field).collect()
}

fn was_watched(run: &Analysis, by: &[&str]) -> bool {
    let traced = run.rounds.iter().flat_map(|round| &round.traced);
    traced.into_iter().any(|name| by.contains(&name.as_str()))
}

pub(super) fn show(html: &mut Html, at: Place, run: &Analysis, exact: &Exact) {
    html.heading(at.prefix, ("path", "Path"), "The path of a request");
    html.note(
        "Down to the device on the left, back up on the right: of each layer the mean and its \
         share of the total, below it percentiles and its share of the slowest 1%. Striped layers \
         were not traced.",
    );
    html.raw("<div class=\"way\">\n");
    stations(html, run);
    application(html, exact, was_watched(run, STATIONS[BLOCK].watched_by));
    let layers: Vec<Layer> = exact.layers.iter().map(|row| row.layer).collect();
    let taken = fields(&layers);
    for field in &taken {
        open(html, field.stations.clone(), field.side);
        let here = exact
            .layers
            .iter()
            .filter(|row| field.layers.contains(&row.layer));
        for row in here {
            step(html, row, exact.is_gap(row.layer), field.side);
        }
        html.raw("</div>\n");
    }
    for field in empty(&taken) {
        let watched = was_watched(run, station_at(run, *field.stations.start()).watched_by);
        open(html, field.stations, field.side);
        nothing(html, watched);
        html.raw("</div>\n");
    }
    let rest = exact
        .layers
        .iter()
        .find(|row| row.layer == Layer::Unattributed);
    if let Some(row) = rest {
        html.raw("<div class=\"station\" style=\"grid-row:9\"></div>\n");
        open(html, STATIONS.len()..=STATIONS.len(), Side::Both);
        step(html, row, true, Side::Down);
        html.raw("</div>\n");
    }
    html.raw("</div>\n");
}

/// Returns the rows of the picture's grid, whose first row is the application's.
fn rows(stations: &RangeInclusive<usize>) -> String {
    format!("grid-row:{}/{}", stations.start() + 2, stations.end() + 3)
}

fn station_at(run: &Analysis, at: usize) -> &'static Station {
    let remote = at
        .checked_sub(HOST)
        .filter(|_| was_watched(run, &["remote"]));
    remote.map_or(&STATIONS[at], |at| &REMOTE[at])
}

/// Shows the names of the stations at the left, with a background for each owner.
fn stations(html: &mut Html, run: &Analysis) {
    let server = match was_watched(run, &["fathom"]) {
        true => "Fathom",
        false => "server",
    };
    station_label(html, "grid-row:1", ("guest", "application"));
    for i in 0..STATIONS.len() {
        let station = station_at(run, i);
        let whose = match station.whose {
            "server" => server,
            whose => whose,
        };
        station_label(html, &rows(&(i..=i)), (whose, station.name));
    }
}

fn station_label(html: &mut Html, style: &str, (whose, name): (&str, &str)) {
    html.open("div", &[("class", "station"), ("style", style)]);
    html.element("strong", &[], name);
    html.element("small", &[], whose);
    html.raw("</div>\n");
}

/// Shows the application, where the path begins and ends, with the time of the whole request.
fn application(html: &mut Html, exact: &Exact, watched: bool) {
    html.raw("<div class=\"field both\" style=\"grid-row:1\">");
    if !watched {
        nothing(html, false);
    } else {
        let total = &exact.total;
        html.raw("<div class=\"step whole\">");
        html.element("strong", &[], "a request, from call to return");
        html.element("b", &[], &duration(total.mean));
        details(html, &percentiles(total.p50, total.p99));
        html.raw("</div>");
    }
    html.raw("</div>\n");
}

fn open(html: &mut Html, stations: RangeInclusive<usize>, side: Side) {
    let class = format!("field {}", side.class());
    html.open("div", &[("class", &class), ("style", &rows(&stations))]);
}

fn nothing(html: &mut Html, watched: bool) {
    match watched {
        true => html.raw("<div class=\"step none\">no request was seen here</div>"),
        false => html.raw("<div class=\"step gap\"><strong>not traced</strong></div>"),
    }
}

fn step(html: &mut Html, row: &LayerRow, is_gap: bool, side: Side) {
    let style = format!(
        "--c:var({});--share:{:.4}",
        layer_colour(row.layer),
        row.share.clamp(0.0, 1.0)
    );
    let class = match (is_gap, side) {
        (false, Side::Both) => "step turn",
        (true, Side::Both) => "step gap turn",
        (true, _) => "step gap",
        (false, _) => "step",
    };
    let key = layer_key(row.layer);
    html.open(
        "div",
        &[("class", class), ("data-key", &key), ("style", &style)],
    );
    html.element("strong", &[], row.name);
    html.element("b", &[], &duration(row.time.mean));
    html.element("em", &[], &percent(row.share));
    let mut small = percentiles(row.time.p50, row.time.p99);
    small.extend(
        row.tail_share
            .map(|share| format!("slowest 1%: {}", percent(share))),
    );
    if is_gap {
        small.push("within it: not traced".to_owned());
    }
    details(html, &small);
    html.raw("<i></i></div>");
}

/// Shows smaller figures; none of them wraps.
fn details(html: &mut Html, all: &[String]) {
    html.raw("<small>");
    for (i, one) in all.iter().enumerate() {
        html.raw(if i > 0 { " \u{b7} " } else { "" });
        html.element("span", &[], one);
    }
    html.raw("</small>");
}

fn percentiles(p50: Option<i64>, p99: Option<i64>) -> Vec<String> {
    let told = [("p50", p50), ("p99", p99)].into_iter();
    told.filter_map(|(name, ns)| Some(format!("{name} {}", duration(ns? as f64))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Group;

    fn told(layers: &[Layer]) -> Vec<(RangeInclusive<usize>, Side, Vec<Layer>)> {
        let fields = fields(layers).into_iter();
        let mut told: Vec<_> = fields
            .map(|field| (field.stations, field.side, field.layers))
            .collect();
        told.sort_by_key(|(stations, side, _)| (*stations.start(), *side as u8));
        told
    }

    #[test]
    fn layers_are_at_their_stations_on_the_way_down_and_up() {
        use Group::{HostIo, Network, RemoteIo, RemoteServer};
        // A request is carried out either here or on another host.
        for elsewhere in [&[HostIo][..], &[Network, RemoteServer, RemoteIo]] {
            let is_here = |layer: &Layer| !elsewhere.contains(&layer.describe().1);
            leads_down_and_up(Layer::ALL.iter().copied().filter(is_here));
        }
    }

    fn leads_down_and_up(layers: impl Iterator<Item = Layer>) {
        let mut last = (BLOCK, Side::Down);
        for layer in layers {
            let Some((stations, side)) = place(layer) else {
                assert_eq!(layer, Layer::Unattributed);
                continue;
            };
            let wide = stations.end() > stations.start();
            assert_eq!(told(&[layer]), [(stations.clone(), side, vec![layer])]);
            if !wide && !layer.is_gap() {
                let onward = match (last.1, side) {
                    (Side::Down, Side::Down) => *stations.start() >= last.0,
                    (Side::Both | Side::Up, Side::Up) => *stations.start() <= last.0,
                    (Side::Both, Side::Both) => *stations.start() == last.0,
                    (from, to) => from == Side::Down && to == Side::Both,
                };
                assert!(onward, "{layer:?}");
                last = (*stations.start(), side);
            }
        }
    }

    #[test]
    fn a_layer_that_stands_for_several_spans_what_nobody_else_is_at() {
        use Layer::*;
        assert_eq!(
            told(&[GuestSubmit, GuestDevice, GuestReturn]),
            [
                (BLOCK..=BLOCK, Side::Down, vec![GuestSubmit]),
                (BLOCK..=BLOCK, Side::Up, vec![GuestReturn]),
                (KVM..=DEVICE, Side::Both, vec![GuestDevice]),
            ]
        );
        // The worker is free, the queue is not.
        assert_eq!(
            told(&[ServerWake, ServerTake]),
            [
                (QUEUE..=QUEUE, Side::Down, vec![ServerWake]),
                (WORKER..=WORKER, Side::Down, vec![ServerTake]),
            ]
        );
        // No station is free: some requests of the run lack points that others have.
        assert_eq!(
            told(&[ServerFinish, ServerNotify, InterruptEntry, InterruptPath]),
            [
                (KVM..=KVM, Side::Up, vec![InterruptEntry, InterruptPath]),
                (QUEUE..=QUEUE, Side::Up, vec![ServerNotify]),
                (WORKER..=WORKER, Side::Up, vec![ServerFinish]),
            ]
        );
    }

    #[test]
    fn fields_never_overlap_and_leave_none_out() {
        // All runs that lack one layer, or that have only the layers from one on.
        let all = Layer::ALL;
        let without = (0..all.len()).map(|i| [&all[..i], &all[i + 1..]].concat());
        let from = (0..all.len()).map(|i| all[i..].to_vec());
        for layers in without.chain(from) {
            let taken = fields(&layers);
            let shown: usize = taken.iter().map(|field| field.layers.len()).sum();
            let known = layers.iter().filter(|&&layer| place(layer).is_some());
            assert_eq!(shown, known.count());
            let fields = [taken.clone(), empty(&taken)].concat();
            for at in 0..STATIONS.len() {
                for side in [Side::Down, Side::Up] {
                    let here = fields.iter().filter(|field| field.meets(at, side));
                    assert_eq!(here.count(), 1, "{at} {side:?} of {layers:?}");
                }
            }
        }
    }
}
