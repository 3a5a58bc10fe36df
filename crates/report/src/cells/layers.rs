//! The layers of a point's requests: the time outside of the server, and the server's stages.

pub(super) mod html;
pub(super) mod terminal;

use fathom_limiter::layers::{NBD, OUTSIDE, STORAGE};

use super::cell::Row;
use super::table::Point;

/// A layer of a point.
struct Part<'a> {
    name: &'a str,
    ns: f64,
    /// Share of the whole request, from 0 to 1.
    share: f64,
}

/// Returns the mean of each layer over the rounds that have it, in the order of a request's path.
pub(super) fn of(rows: &[Row]) -> Vec<(String, f64)> {
    let mut sums: Vec<(String, f64, u32)> = Vec::new();
    for layer in rows.iter().flat_map(|row| &row.layers) {
        match sums.iter_mut().find(|(name, ..)| *name == layer.name) {
            Some((_, sum, count)) => {
                *sum += layer.mean_ns;
                *count += 1;
            }
            None => sums.push((layer.name.clone(), layer.mean_ns, 1)),
        }
    }
    let means = sums.into_iter();
    means
        .map(|(name, sum, count)| (name, sum / f64::from(count)))
        .collect()
}

/// Returns the whole time of a request in ns, and its parts; None if the layers were not seen.
fn parts(point: &Point) -> Option<(f64, Vec<Part<'_>>)> {
    let whole: f64 = point.layers.iter().map(|(_, ns)| ns).sum();
    (whole > 0.0 && whole.is_finite()).then(|| {
        let parts = point.layers.iter().map(|(name, ns)| Part {
            name,
            ns: *ns,
            share: ns / whole,
        });
        (whole, parts.collect())
    })
}

/// Returns the variable of palette.css with the colour of a layer.
fn colour(layer: &str) -> &'static str {
    match layer {
        OUTSIDE => "--g-guest",
        STORAGE => "--l-host_device",
        NBD => "--g-remote_io",
        "fathom: wake" => "--l-server_pop",
        "fathom: queue" => "--l-server_queue",
        "fathom: map" => "--l-server_map",
        "fathom: finish" => "--l-server_finish",
        "fathom: notify" => "--l-server_notify",
        _ => "--plain",
    }
}

/// Explains the picture.
const EXPLAINED: &str = "A request, from its start in the guest to its end. Fathom's own stages \
     are those with its name; the storage is within them, between map and finish.";
