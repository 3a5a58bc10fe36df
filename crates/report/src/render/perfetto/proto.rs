//! Writes the wire format of Protocol Buffers, as far as a trace needs it.

/// A message that is being built.
#[derive(Clone, Debug, Default)]
pub(super) struct Message(Vec<u8>);

const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const BYTES: u64 = 2;

impl Message {
    pub(super) fn new() -> Message {
        Message::default()
    }

    pub(super) fn uint(&mut self, field: u32, value: u64) -> &mut Message {
        self.varint(u64::from(field) << 3 | VARINT);
        self.varint(value);
        self
    }

    /// Adds an `int64`: two's complement, not zigzag.
    pub(super) fn int(&mut self, field: u32, value: i64) -> &mut Message {
        self.uint(field, value as u64)
    }

    pub(super) fn fixed(&mut self, field: u32, value: u64) -> &mut Message {
        self.varint(u64::from(field) << 3 | FIXED64);
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(super) fn text(&mut self, field: u32, value: &str) -> &mut Message {
        self.bytes(field, value.as_bytes())
    }

    pub(super) fn message(&mut self, field: u32, value: &Message) -> &mut Message {
        self.bytes(field, &value.0)
    }

    fn bytes(&mut self, field: u32, value: &[u8]) -> &mut Message {
        self.varint(u64::from(field) << 3 | BYTES);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_as_the_specification_shows_them() {
        // The examples in the encoding's documentation: field 1 = 150, field 2 = "testing",
        // field 3 = a message with field 1 = 150.
        let mut inner = Message::new();
        inner.uint(1, 150);
        let mut message = inner.clone();
        message.text(2, "testing").message(3, &inner);
        let expected = b"\x08\x96\x01\x12\x07testing\x1a\x03\x08\x96\x01";
        assert_eq!(message.into_bytes(), expected);
        let mut negative = Message::new();
        negative.int(1, -2);
        assert_eq!(
            negative.into_bytes(),
            b"\x08\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"
        );
    }
}
