//! Suggestions for misspelt names.

/// Returns the known name that `name` was most probably meant to be, if one is similar enough.
///
/// Two names are similar if they differ in at most a third of the letters of `name`, or if one
/// begins with the other. The comparison ignores case, and treats `-`, `_` and `.` as equal.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = folded(name);
    let allowed = (name.len() / 3).max(1);
    let rated = known.into_iter().filter_map(|one| {
        let other = folded(one);
        let distance = distance(&name, &other);
        let begins = name.len().min(other.len()) >= LEAST_PREFIX
            && (name.starts_with(&other) || other.starts_with(&name));
        let is_similar = distance <= allowed && distance < other.len();
        (is_similar || begins).then_some((!is_similar, distance, one))
    });
    rated.min().map(|(.., one)| one)
}

/// Returns `; did you mean 'NAME'?` with the nearest known name, or nothing.
pub fn did_you_mean<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    match nearest(name, known) {
        Some(one) => format!("; did you mean '{one}'?"),
        None => String::new(),
    }
}

/// Minimum length in characters of a name that counts as a prefix of another name.
const LEAST_PREFIX: usize = 3;

/// Maximum number of characters that are compared; known names are shorter.
const LONGEST: usize = 64;

fn folded(name: &str) -> Vec<char> {
    let letters = name.chars().take(LONGEST).flat_map(char::to_lowercase);
    let folded = letters.map(|letter| match letter {
        '_' | '.' => '-',
        other => other,
    });
    folded.collect()
}

/// Returns the optimal string alignment distance between `a` and `b`.
///
/// The distance is the number of letters to insert, remove, replace, or swap with their neighbour,
/// to turn `a` into `b`.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut before = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let is_other = usize::from(a[i - 1] != b[j - 1]);
            row[j] = (last[j - 1] + is_other)
                .min(last[j] + 1)
                .min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names_are_suggested() {
        let known = [
            "image",
            "readonly",
            "iops-read",
            "iops-total",
            "vm1",
            "vm10",
            "throttle",
        ];
        for (name, expected) in [
            ("imgae", Some("image")),
            ("Image", Some("image")),
            ("read-only", Some("readonly")),
            ("iops_total", Some("iops-total")),
            ("iops", Some("iops-read")),
            ("throtle", Some("throttle")),
            ("throttle-group", Some("throttle")),
            ("vm11", Some("vm1")),
            ("vm2", Some("vm1")),
            ("", None),
            ("x", None),
            ("size", None),
            ("cache", None),
        ] {
            assert_eq!(nearest(name, known), expected, "{name}");
        }
        assert_eq!(nearest("a", ["b"]), None);
    }

    #[test]
    fn a_suggestion_ends_a_sentence() {
        assert_eq!(did_you_mean("imag", ["image"]), "; did you mean 'image'?");
        assert_eq!(did_you_mean("x", ["image"]), "");
    }
}
