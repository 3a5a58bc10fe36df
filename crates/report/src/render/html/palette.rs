//! Tests of the palette: every layer has its own colour in both themes, and colour-blind readers
//! can also distinguish layers that appear next to each other.

use super::words::{group_colour, layer_colour};
use crate::analysis::{Layer, Point};

type Colour = [f64; 3];

const PALETTE: &str = include_str!("page/palette.css");
/// The background of charts (`--surface`): light, dark.
const SURFACES: [&str; 2] = ["#ffffff", "#161b21"];

/// How protan, deutan and tritan readers see linear RGB (Machado and others, 2009, severity 1).
const BLINDNESS: [[Colour; 3]; 3] = [
    [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
];

/// The identity, for readers with normal colour vision.
const SIGHT: [Colour; 3] = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]];

fn product(matrix: &[Colour; 3], of: Colour) -> Colour {
    matrix.map(|row| row.iter().zip(of).map(|(a, b)| a * b).sum())
}

/// Converts `#rrggbb` to linear RGB.
fn linear(hex: &str) -> Colour {
    [1, 3, 5].map(|at| {
        let part = u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        match f64::from(part) / 255.0 {
            low if low <= 0.04045 => low / 12.92,
            high => ((high + 0.055) / 1.055).powf(2.4),
        }
    })
}

/// Converts linear RGB to OKLab, whose distances match perception; black to white is 1.
fn lab(linear: Colour) -> Colour {
    const CONES: [Colour; 3] = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ];
    const LAB: [Colour; 3] = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ];
    product(&LAB, product(&CONES, linear).map(f64::cbrt))
}

fn distance(sight: &[Colour; 3], a: Colour, b: Colour) -> f64 {
    let seen = |colour| lab(product(sight, colour).map(|part| part.clamp(0.0, 1.0)));
    let (a, b) = (seen(a), seen(b));
    let squares = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b));
    squares.sum::<f64>().sqrt()
}

/// Returns the contrast of two colours, as defined by WCAG.
fn contrast(a: Colour, b: Colour) -> f64 {
    let light = |c: Colour| 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2] + 0.05;
    light(a).max(light(b)) / light(a).min(light(b))
}

/// Returns the colour of a variable in the light theme and in the dark one.
fn themes(variable: &str) -> [Colour; 2] {
    let variable = format!("{variable}: ");
    let found = PALETTE.split(&variable).skip(1);
    let colours: Vec<Colour> = found.map(|rest| linear(&rest[..7])).collect();
    colours
        .try_into()
        .unwrap_or_else(|_| panic!("{variable} once in each theme"))
}

/// Returns whether one layer can follow the other on a request's path, or in a list.
fn are_neighbours(a: Layer, b: Layer) -> bool {
    let joins = |a: Layer, b: Layer| match (a.span(), b.span()) {
        (Some((_, to)), Some((from, _))) => {
            // If the vCPU was in the guest, the layer starts at the interrupt.
            let at_once = b == Layer::InterruptEntry && to == Point::Interrupt;
            to == from || at_once
        }
        _ => true,
    };
    (a as u8).abs_diff(b as u8) == 1 || joins(a, b) || joins(b, a)
}

#[test]
fn every_layer_and_group_has_a_colour_in_both_themes() {
    for &layer in Layer::ALL {
        themes(&layer_colour(layer));
        themes(&group_colour(layer.describe().1));
    }
}

#[test]
fn no_two_layers_look_alike_and_neighbours_least_of_all() {
    for (theme, surface) in SURFACES.iter().enumerate() {
        for (i, &a) in Layer::ALL.iter().enumerate() {
            let colour = themes(&layer_colour(a))[theme];
            let stands_out = contrast(colour, linear(surface));
            assert!(stands_out >= 2.0, "{a:?} on {surface}: {stands_out:.2}");
            for &b in &Layer::ALL[i + 1..] {
                let other = themes(&layer_colour(b))[theme];
                let seen = distance(&SIGHT, colour, other);
                let least = if are_neighbours(a, b) { 0.16 } else { 0.06 };
                assert!(seen >= least, "{a:?}, {b:?} on {surface}: {seen:.3}");
                let blind = BLINDNESS.map(|sight| distance(&sight, colour, other));
                let worst = blind.into_iter().fold(f64::MAX, f64::min);
                let told = !are_neighbours(a, b) || worst >= 0.1;
                assert!(told, "colour-blind, {a:?}, {b:?} on {surface}: {worst:.3}");
            }
        }
    }
}
