//! Enums whose values are words of options. Each enum is defined by its list of words.

/// Defines an enum with a word for each value. The enum has `ALL`, `FORM` (for help), `name()`,
/// `Display` and `FromStr`.
macro_rules! words {
    (
        $(#[$meta:meta])*
        pub enum $type:ident {
            $(#[$first_doc:meta])* $first:ident = $first_word:literal
            $(, $(#[$doc:meta])* $value:ident = $word:literal)* $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $type {
            $(#[$first_doc])* $first,
            $($(#[$doc])* $value,)*
        }

        impl $type {
            /// All values.
            pub const ALL: &[$type] = &[$type::$first $(, $type::$value)*];
            /// All words, separated by commas.
            pub const FORM: &str = concat!($first_word $(, ", ", $word)*);

            /// Returns the word of the value.
            pub fn name(self) -> &'static str {
                match self {
                    $type::$first => $first_word,
                    $($type::$value => $word,)*
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> std::result::Result<$type, String> {
                let found = $type::ALL.iter().find(|one| one.name() == text);
                found
                    .copied()
                    .ok_or_else(|| format!("'{text}' is none of {}", $type::FORM))
            }
        }
    };
}

pub(crate) use words;

#[cfg(test)]
mod tests {
    words! {
        /// A traffic light.
        pub enum Colour {
            Red = "red",
            Green = "go-on",
        }
    }

    #[test]
    fn words_are_read_as_they_are_written() {
        for colour in Colour::ALL {
            assert_eq!(colour.to_string().parse(), Ok(*colour));
        }
        assert_eq!(Colour::FORM, "red, go-on");
        let error = "blue".parse::<Colour>().unwrap_err();
        assert_eq!(error, "'blue' is none of red, go-on");
    }
}
