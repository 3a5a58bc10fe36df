//! The verdict of the layers: the layer to look at, or that none stands out.

use crate::analysis::{Analysis, Exact, Group, Layer, LayerRow};
use crate::render::text::percent;

/// Minimum number of requests for a verdict; with fewer, the result could be chance.
const FEW: u64 = 100;
/// Least share of the time, and least ratio to the next layer, for a layer to stand out.
const LEAST_SHARE: f64 = 1.0 / 3.0;
const LEAST_LEAD: f64 = 1.5;

/// A piece of a sentence; each renderer has its own form for a layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Piece {
    Text(String),
    /// A layer, and its name in this run.
    Layer(Layer, &'static str),
}

/// How a renderer writes a time in ns.
pub(crate) type Duration = fn(f64) -> String;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Verdict {
    TooFew,
    /// The guest's requests take no longer than the host's own.
    NothingAdded,
    Judged {
        /// The greatest part of the time that the guest adds to the host's, or of the mean.
        most: Part,
        over_host: bool,
        /// The greatest part of the slowest requests, if there are enough and no event was lost.
        tail: Option<Part>,
    },
}

/// The layer with the greatest part of some time.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    layer: Layer,
    ns: f64,
    share: f64,
    stands_out: bool,
}

/// Returns the verdict in a sentence or two; None if no request was followed.
pub(crate) fn sentence(run: &Analysis, duration: Duration) -> Option<Vec<Piece>> {
    let exact = run.exact.as_ref().filter(|exact| exact.total.count > 0)?;
    let text = |text: String| vec![Piece::Text(text)];
    Some(match judge(run, exact)? {
        Verdict::TooFew => text(format!(
            "Too few requests were followed to suspect a layer: {} of {}.",
            exact.truth.joined, exact.truth.requests
        )),
        Verdict::NothingAdded => {
            text("The guest adds nothing to what the host alone takes: no layer stands out.".into())
        }
        Verdict::Judged {
            most,
            over_host,
            tail,
        } => {
            let before = match most.stands_out {
                true => "Suspect: ",
                false => "No layer stands out. The greatest part is ",
            };
            about(exact, before, most, over_host, tail, duration)
        }
    })
}

/// Returns the largest layers of the mean and of the slowest requests, for a run whose limiter is
/// known from other evidence; None if the layers are too few or too small to say that.
pub(crate) fn largest(run: &Analysis, duration: Duration) -> Option<Vec<Piece>> {
    let exact = run.exact.as_ref().filter(|exact| exact.total.count > 0)?;
    match judge(run, exact)? {
        Verdict::TooFew | Verdict::NothingAdded => None,
        Verdict::Judged {
            most,
            over_host,
            tail,
        } => {
            let before = " By the requests that were followed, the largest part is ";
            Some(about(exact, before, most, over_host, tail, duration))
        }
    }
}

/// Describes the greatest part, after the words `before`, and the greatest of the tail.
fn about(
    exact: &Exact,
    before: &str,
    most: Part,
    over_host: bool,
    tail: Option<Part>,
    duration: Duration,
) -> Vec<Piece> {
    let is_sum = over_host && is_a_sum(&exact.layers, most.layer);
    let (ns, share) = (duration(most.ns), percent(most.share));
    let part = match over_host {
        true => format!("+{ns} over the host alone, {share} of what the guest adds."),
        false => format!("{ns}, {share} of the mean."),
    };
    let mut end = match before.starts_with("Suspect") {
        true => format!(", {part}"),
        false => format!(": {part}"),
    };
    if exact.is_gap(most.layer) {
        end.push_str(" The layers within it were not traced.");
    }
    let mut pieces = vec![Piece::Text(before.into())];
    if is_sum {
        // The layer itself took less than the sum given here.
        pieces.push(Piece::Text("the host's I/O, most of it ".into()));
    }
    pieces.extend([named(exact, most.layer), Piece::Text(end)]);
    let said = (!is_sum).then_some(most.layer);
    let tail = tail.map(|tail| about_tail(exact, said, tail));
    pieces.extend(tail.unwrap_or_default());
    pieces
}

/// Returns the name of a part. Both directions of the network are one part, see [`parts`].
fn named(exact: &Exact, layer: Layer) -> Piece {
    match layer.describe().1 {
        Group::Network => Piece::Text("the network, there and back".into()),
        _ => Piece::Layer(layer, exact.name_of(layer)),
    }
}

/// Describes the part in the slowest requests; `before` is the layer already mentioned.
fn about_tail(exact: &Exact, before: Option<Layer>, tail: Part) -> Vec<Piece> {
    let share = percent(tail.share);
    if !tail.stands_out {
        return vec![Piece::Text(" In the slowest 1%, none stands out.".into())];
    }
    if before == Some(tail.layer) {
        return vec![Piece::Text(format!(
            " This part takes {share} of the slowest 1%."
        ))];
    }
    vec![
        Piece::Text(" In the slowest 1%, the largest part is ".into()),
        named(exact, tail.layer),
        Piece::Text(format!(": {share}.")),
    ]
}

fn judge(run: &Analysis, exact: &Exact) -> Option<Verdict> {
    let truth = &exact.truth;
    if exact.total.count < FEW || truth.joined * 2 < truth.requests {
        return Some(Verdict::TooFew);
    }
    let error = truth.clock_error_ns.unwrap_or(0) as f64;
    let host = host_alone(run).and_then(|host| added(&exact.layers, host));
    let over_host = host.is_some();
    let most = match host {
        Some(parts) => {
            if sum(&parts) <= 0.0 {
                return Some(Verdict::NothingAdded);
            }
            // The cost of tracing a request is contained in what its layers seem to add.
            let costs = run.overhead.iter().map(|cost| cost.difference_ns);
            greatest(&parts, costs.fold(error, f64::max))?
        }
        None => greatest(&parts(&exact.layers, |row| row.time.mean), error)?,
    };
    let whole = exact.layers.iter().all(|row| row.tail_mean.is_some()) && truth.lost.is_empty();
    let tail = || {
        greatest(
            &parts(&exact.layers, |row| row.tail_mean.unwrap_or(0.0)),
            error,
        )
    };
    let tail = if whole { tail() } else { None };
    Some(Verdict::Judged {
        most,
        over_host,
        tail,
    })
}

/// Returns each layer's part. Both directions of the network are one part: their sum does not
/// depend on how the two clocks were related.
fn parts(rows: &[LayerRow], of: fn(&LayerRow) -> f64) -> Vec<(Layer, f64)> {
    let is_network = |row: &&LayerRow| row.group == Group::Network;
    let others = rows.iter().filter(|row| !is_network(row));
    let network = rows.iter().filter(is_network);
    let both = network.clone().map(of).sum();
    let both = network.map(|row| (row.layer, both)).next();
    let others = others.map(|row| (row.layer, of(row)));
    others.chain(both).collect()
}

fn sum(parts: &[(Layer, f64)]) -> f64 {
    parts.iter().map(|(_, ns)| ns).sum()
}

/// Returns the greatest of the positive parts; a part of at most `doubt` ns does not stand out.
fn greatest(parts: &[(Layer, f64)], doubt: f64) -> Option<Part> {
    let mut parts: Vec<_> = parts.iter().filter(|(_, ns)| *ns > 0.0).copied().collect();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let &(layer, ns) = parts.first()?;
    let next = parts.get(1).map_or(0.0, |(_, ns)| *ns);
    let share = ns / sum(&parts);
    let stands_out = share >= LEAST_SHARE && ns >= next * LEAST_LEAD && ns > doubt;
    Some(Part {
        layer,
        ns,
        share,
        stands_out,
    })
}

/// Returns whether a layer stands for all of the host's I/O, see [`added`].
fn is_a_sum(rows: &[LayerRow], layer: Layer) -> bool {
    let group = rows
        .iter()
        .find(|row| row.layer == layer)
        .map(|row| row.group);
    let group = group.filter(|group| matches!(group, Group::HostIo | Group::Device));
    rows.iter().filter(|row| Some(row.group) == group).count() > 1
}

/// Returns what each layer adds to a request on the host alone, which consists of I/O only. The
/// layers of the host's I/O are one part, named after the greatest of them. Returns None if the run
/// does not separate that I/O from the rest.
fn added(rows: &[LayerRow], host: f64) -> Option<Vec<(Layer, f64)>> {
    let is_guest = |row: &LayerRow| row.group == Group::Guest;
    let has = |group| rows.iter().any(|row| row.group == group);
    let group = [Group::HostIo, Group::Device]
        .into_iter()
        .find(|&group| has(group));
    let group = group.filter(|_| rows.iter().any(is_guest))?;
    let (io, others): (Vec<&LayerRow>, Vec<&LayerRow>) =
        rows.iter().partition(|row| row.group == group);
    let greatest = io
        .iter()
        .max_by(|a, b| a.time.mean.total_cmp(&b.time.mean))?;
    let io: f64 = io.iter().map(|row| row.time.mean).sum();
    let others = others.iter().map(|row| (row.layer, row.time.mean));
    Some(others.chain([(greatest.layer, io - host)]).collect())
}

/// Returns the time of the host alone for the call that the traced guest's benchmark made.
fn host_alone(run: &Analysis) -> Option<f64> {
    let traced = run
        .rounds
        .iter()
        .filter(|round| !round.on_host && !round.traced.is_empty());
    let mut calls = traced.filter_map(|round| Some(round.benchmark.as_ref()?.call.as_str()));
    let call = calls.next()?;
    let same = calls.all(|other| other == call);
    let host = untraced(run, true)
        .into_iter()
        .find(|(host, _)| same && *host == call);
    host.map(|(_, ns)| ns)
}

/// Returns the benchmark's calls in rounds without collectors, each with its mean over operations.
pub(crate) fn untraced(run: &Analysis, on_host: bool) -> Vec<(&str, f64)> {
    let figures = || {
        let rounds = run.rounds.iter();
        let rounds =
            rounds.filter(move |round| round.on_host == on_host && round.traced.is_empty());
        let figures = rounds.filter_map(|round| round.benchmark.as_ref());
        figures.filter(|figure| figure.operations > 0)
    };
    let mut calls: Vec<&str> = Vec::new();
    for figure in figures() {
        if !calls.contains(&figure.call.as_str()) {
            calls.push(&figure.call);
        }
    }
    let mean = |call| {
        let figures = || figures().filter(|figure| figure.call == call);
        let count: u64 = figures().map(|figure| figure.operations).sum();
        let time = figures().map(|figure| figure.mean_ns * figure.operations as f64);
        (call, time.sum::<f64>() / count as f64)
    };
    calls.into_iter().map(mean).collect()
}

#[cfg(test)]
mod tests;
