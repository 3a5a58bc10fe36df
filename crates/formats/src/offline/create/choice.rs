//! Parses options whose values are words.

use crate::{Error, Result};

pub(super) fn choose<T: Copy>(name: &str, value: &str, choices: &[(&str, T)]) -> Result<T> {
    let chosen = choices.iter().find(|(text, _)| *text == value);
    chosen.map(|(_, choice)| *choice).ok_or_else(|| {
        let all: Vec<_> = choices.iter().map(|(text, _)| *text).collect();
        let all = all.join(", ");
        Error::usage(format!("{name}: '{value}' is not one of {all}"))
    })
}

pub(super) fn on_or_off(name: &str, value: &str) -> Result<bool> {
    let words = [
        ("on", true),
        ("off", false),
        ("true", true),
        ("false", false),
    ];
    let words = [&words[..], &[("yes", true), ("no", false)]].concat();
    choose(name, value, &words)
}
