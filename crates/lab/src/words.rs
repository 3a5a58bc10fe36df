//! Types whose values are words of options: each is defined by its list of words.

/// An enum with a word for each value: `ALL`, `FORM` (for help), `name()`, and both ways between
/// value and word.
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
            /// All of them.
            pub const ALL: &[$type] = &[$type::$first $(, $type::$value)*];
            /// How to say them.
            pub const FORM: &str = concat!($first_word $(, ", ", $word)*);

            /// Its word.
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
        /// Of traffic lights.
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
