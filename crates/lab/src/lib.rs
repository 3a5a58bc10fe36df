//! Guests and what runs in them.
