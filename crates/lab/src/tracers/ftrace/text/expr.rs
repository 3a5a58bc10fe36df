//! Parses the arguments of an event's `print fmt`, as far as printing can be inverted: from the
//! printed text back to the field.

/// The expression that a conversion prints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Expr {
    /// A field or an element of it, shifted to the right by some bits.
    Number {
        field: String,
        element: usize,
        shift: u32,
    },
    /// A word for each value of a field.
    Words {
        field: String,
        shift: u32,
        words: Vec<(u64, String)>,
    },
    /// A choice between two expressions, depending on whether a field has this value.
    Choice {
        field: String,
        value: u64,
        yes: Box<Expr>,
        no: Box<Expr>,
    },
    /// An expression from whose text no field can be recovered.
    Unknown,
}

impl Expr {
    pub fn parse(text: &str) -> Expr {
        let text = strip(text);
        if let Some((condition, yes, no)) = conditional(text) {
            return choice(condition, yes, no);
        }
        if let Some(inside) = call(text, "__print_symbolic") {
            let mut parts = split(inside).into_iter();
            let value = Expr::parse(parts.next().unwrap_or_default());
            let words: Option<Vec<(u64, String)>> = parts.map(word).collect();
            return match (value, words) {
                (
                    Expr::Number {
                        field,
                        element: 0,
                        shift,
                    },
                    Some(words),
                ) => Expr::Words {
                    field,
                    shift,
                    words,
                },
                _ => Expr::Unknown,
            };
        }
        number(text)
    }

    /// Appends the fields that the printed text determines to `told`.
    pub fn fields(&self, told: &mut Vec<String>) {
        match self {
            Expr::Number { field, .. } | Expr::Words { field, .. } => told.push(field.clone()),
            Expr::Choice { field, yes, no, .. } => {
                told.push(field.clone());
                // Only fields that both branches determine.
                let (mut left, mut right) = (Vec::new(), Vec::new());
                yes.fields(&mut left);
                no.fields(&mut right);
                told.extend(left.into_iter().filter(|name| right.contains(name)));
            }
            Expr::Unknown => {}
        }
    }
}

fn choice(condition: &str, yes: &str, no: &str) -> Expr {
    let (tested, value) = match condition.split_once("==") {
        Some((tested, value)) => match integer(strip(value)) {
            Some(value) => (tested, Some(value)),
            None => return Expr::Unknown,
        },
        None => (condition, None),
    };
    let Expr::Number {
        field,
        element: 0,
        shift: 0,
    } = number(strip(tested))
    else {
        return Expr::Unknown;
    };
    if strip(tested) != format!("REC->{field}") {
        return Expr::Unknown;
    }
    match (literal(yes), literal(no), value) {
        (Some(yes), Some(no), None) => {
            let words = vec![(1, yes), (0, no)];
            Expr::Words {
                field,
                shift: 0,
                words,
            }
        }
        (None, None, Some(value)) => {
            let (yes, no) = (Box::new(Expr::parse(yes)), Box::new(Expr::parse(no)));
            Expr::Choice {
                field,
                value,
                yes,
                no,
            }
        }
        _ => Expr::Unknown,
    }
}

/// Parses `((REC->dev) >> 20)`, `(REC->dev) & ((1U << 20) - 1)` or `REC->args[2]`.
fn number(text: &str) -> Expr {
    let unknown = Expr::Unknown;
    let mut fields = text.match_indices("REC->");
    let (Some((at, _)), None) = (fields.next(), fields.next()) else {
        return unknown;
    };
    let rest = &text[at + 5..];
    let end = rest
        .find(|c: char| !c.is_alphanumeric() && c != '_')
        .unwrap_or(rest.len());
    let (field, rest) = rest.split_at(end);
    let (element, rest) = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((number, rest)) => match number.parse() {
            Ok(number) => (number, rest),
            Err(_) => return unknown,
        },
        None => (0, rest),
    };
    // Masks and casts only remove bits that are not printed. Any other operator is a computation.
    let (before, shift) = (&text[..at], shift_of(rest));
    if before.contains(['+', '-', '*', '/', '|', '~', '<']) || rest.contains(['+', '*', '|', '?']) {
        return unknown;
    }
    Expr::Number {
        field: field.to_owned(),
        element,
        shift,
    }
}

fn shift_of(text: &str) -> u32 {
    let number = text.split_once(">>").and_then(|(_, rest)| {
        let digits = rest.trim_start();
        let end = digits
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(digits.len());
        digits[..end].parse().ok()
    });
    number.filter(|&shift| shift < 64).unwrap_or(0)
}

/// Parses `{ 0x400, "npf" }`. The value may be a sum.
fn word(text: &str) -> Option<(u64, String)> {
    let inside = text.trim().strip_prefix('{')?.strip_suffix('}')?;
    let (value, name) = inside.split_once(',')?;
    let terms = value.split('+').map(|term| integer(strip(term)));
    let value = terms.sum::<Option<u64>>()?;
    Some((value, literal(name)?))
}

fn integer(text: &str) -> Option<u64> {
    let text = text.trim().trim_end_matches(['u', 'U', 'l', 'L']);
    match (text.strip_prefix("0x"), text.strip_prefix('-')) {
        (Some(digits), _) => u64::from_str_radix(digits, 16).ok(),
        (_, Some(digits)) => digits.parse::<u64>().ok().map(u64::wrapping_neg),
        _ => text.parse().ok(),
    }
}

/// Parses one or more adjacent string literals.
pub(super) fn literal(text: &str) -> Option<String> {
    let (mut rest, mut all) = (strip(text), String::new());
    while !rest.is_empty() {
        let (one, after) = first_literal(rest)?;
        all.push_str(&one);
        rest = after.trim_start();
    }
    Some(all)
}

/// Parses a string literal and returns it with the text that follows it.
pub(super) fn first_literal(text: &str) -> Option<(String, &str)> {
    let inside = text.trim_start().strip_prefix('"')?;
    let (mut all, mut escaped) = (String::new(), false);
    for (at, letter) in inside.char_indices() {
        match letter {
            _ if escaped => {
                all.push(if letter == 'n' { '\n' } else { letter });
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => return Some((all, &inside[at + 1..])),
            letter => all.push(letter),
        }
    }
    None
}

/// Returns the inside of `name(...)`, if nothing follows it.
fn call<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let inside = text.strip_prefix(name)?.trim_start().strip_prefix('(')?;
    all_of(inside)
}

/// Removes blanks around the text and parentheses around the whole text.
fn strip(text: &str) -> &str {
    let mut text = text.trim();
    while let Some(inside) = text.strip_prefix('(').and_then(all_of) {
        text = inside.trim();
    }
    text
}

/// Returns the inside of a parenthesis that has just been opened, if nothing follows it.
fn all_of(text: &str) -> Option<&str> {
    let inside = text.strip_suffix(')')?;
    (closing(text)? == inside.len()).then_some(inside)
}

/// Returns the offset at which the parenthesis that has just been opened is closed.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    let place = outside_literals(text).find(|&(_, letter)| match letter {
        b'(' => {
            depth += 1;
            false
        }
        b')' if depth == 0 => true,
        b')' => {
            depth -= 1;
            false
        }
        _ => false,
    });
    place.map(|(at, _)| at)
}

/// Splits `condition ? yes : no` at the outermost level.
fn conditional(text: &str) -> Option<(&str, &str, &str)> {
    let question = top_level(text, b'?').next()?;
    let rest = &text[question + 1..];
    // A nested conditional has its own colon.
    let inner: Vec<usize> = top_level(rest, b'?').collect();
    let colon = top_level(rest, b':')
        .enumerate()
        .find(|(before, at)| inner.iter().filter(|place| *place < at).count() <= *before)?
        .1;
    let condition = strip(&text[..question]);
    Some((condition, &rest[..colon], &rest[colon + 1..]))
}

/// Splits at commas of the outermost level.
pub(super) fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut from) = (Vec::new(), 0);
    for at in top_level(text, b',') {
        parts.push(&text[from..at]);
        from = at + 1;
    }
    parts.push(&text[from..]);
    parts
}

/// Returns the offsets of a letter outside of parentheses, braces, brackets and literals.
fn top_level(text: &str, wanted: u8) -> impl Iterator<Item = usize> {
    let mut depth = 0i64;
    outside_literals(text).filter_map(move |(at, letter)| {
        match letter {
            b'(' | b'{' | b'[' => depth += 1,
            b')' | b'}' | b']' => depth -= 1,
            _ => {}
        }
        (depth == 0 && letter == wanted).then_some(at)
    })
}

fn outside_literals(text: &str) -> impl Iterator<Item = (usize, u8)> {
    let (mut inside, mut escaped) = (false, false);
    text.bytes().enumerate().filter(move |&(_, letter)| {
        let was_inside = inside;
        if escaped {
            escaped = false;
        } else if letter == b'\\' {
            escaped = inside;
        } else if letter == b'"' {
            inside = !inside;
        }
        !was_inside && letter != b'"'
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(field: &str, element: usize, shift: u32) -> Expr {
        Expr::Number {
            field: field.into(),
            element,
            shift,
        }
    }

    #[test]
    fn what_can_be_undone_is_recognised() {
        for (text, wanted) in [
            ("REC->args[3]", field("args", 3, 0)),
            ("((unsigned int) ((REC->dev) >> 20))", field("dev", 0, 20)),
            (
                "((unsigned int) ((REC->dev) & ((1U << 20) - 1)))",
                field("dev", 0, 0),
            ),
            ("(unsigned long long)REC->sector", field("sector", 0, 0)),
            ("REC->nr * 512", Expr::Unknown),
            ("(", Expr::Unknown),
            ("((", Expr::Unknown),
            ("()", Expr::Unknown),
            ("__print_symbolic(", Expr::Unknown),
            ("__get_str(cmd)", Expr::Unknown),
            (
                "(u8)(REC->a >> 12) | ((REC->a >> 32) & 0xff)",
                Expr::Unknown,
            ),
            ("REC->errno < 0 ? -REC->errno : REC->reason", Expr::Unknown),
        ] {
            assert_eq!(Expr::parse(text), wanted, "{text}");
        }
    }

    #[test]
    fn words_stand_for_values() {
        let words = Expr::parse(
            "__print_symbolic((REC->dm >> 8 & 0x7), {0x0, \"Fi\" \"xed\"}, {1+1, \"b\"})",
        );
        let table = vec![(0, "Fixed".to_owned()), (2, "b".to_owned())];
        assert_eq!(
            words,
            Expr::Words {
                field: "dm".into(),
                shift: 8,
                words: table
            }
        );
        let either = Expr::parse("REC->rw ? \"write\" : \"read\"");
        let table = vec![(1, "write".to_owned()), (0, "read".to_owned())];
        assert_eq!(
            either,
            Expr::Words {
                field: "rw".into(),
                shift: 0,
                words: table
            }
        );
        let choice = Expr::parse(
            "(REC->isa == 1) ? __print_symbolic(REC->r & 0xffff, { 1, \"a\" }) : \
             __print_symbolic(REC->r, { 0x40 + 1, \"?:\" }, { -1, \"bad\" })",
        );
        let mut told = Vec::new();
        choice.fields(&mut told);
        assert_eq!(told, ["isa", "r"]);
        let Expr::Choice { no, .. } = choice else {
            panic!()
        };
        let table = vec![(0x41, "?:".to_owned()), (u64::MAX, "bad".to_owned())];
        assert_eq!(
            *no,
            Expr::Words {
                field: "r".into(),
                shift: 0,
                words: table
            }
        );
    }
}
