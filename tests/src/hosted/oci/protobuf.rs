//! Messages of protocol buffers, as far as the CRI needs them: numbers and what has a length.

use anyhow::{Context, Result, bail};

/// Wire types: a number of variable length, and bytes after their length.
const NUMBER: u64 = 0;
const BYTES: u64 = 2;
/// Bits of the wire type in a field's tag.
const TYPE_BITS: u32 = 3;

/// Message that is sent.
#[derive(Clone, Debug, Default)]
pub struct Message(Vec<u8>);

impl Message {
    /// Appends a number.
    pub fn number(mut self, field: u64, value: u64) -> Self {
        self.varint(field << TYPE_BITS | NUMBER);
        self.varint(value);
        self
    }

    /// Appends a text.
    pub fn text(self, field: u64, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    /// Appends a message.
    pub fn message(self, field: u64, value: &Self) -> Self {
        self.bytes(field, &value.0)
    }

    /// Returns the encoded message.
    pub fn encoded(&self) -> &[u8] {
        &self.0
    }

    fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.varint(field << TYPE_BITS | BYTES);
        self.varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    fn varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// Field of a message that was received.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Number(u64),
    Bytes(Vec<u8>),
}

/// Message that was received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields(Vec<(u64, Value)>);

impl Fields {
    /// Decodes a message.
    pub fn decode(mut bytes: &[u8]) -> Result<Self> {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let tag = varint(&mut bytes)?;
            let value = match tag & ((1 << TYPE_BITS) - 1) {
                NUMBER => Value::Number(varint(&mut bytes)?),
                BYTES => {
                    let length = usize::try_from(varint(&mut bytes)?).context("a length")?;
                    let (value, rest) = bytes.split_at_checked(length).context("a short field")?;
                    bytes = rest;
                    Value::Bytes(value.to_owned())
                }
                other => bail!("a field has the wire type {other}"),
            };
            fields.push((tag >> TYPE_BITS, value));
        }
        Ok(Self(fields))
    }

    fn find(&self, field: u64) -> Option<&Value> {
        self.0.iter().find(|(number, _)| *number == field).map(|(_, value)| value)
    }

    /// Returns a number; fields that are 0 are not sent.
    pub fn number(&self, field: u64) -> u64 {
        match self.find(field) {
            Some(Value::Number(value)) => *value,
            _ => 0,
        }
    }

    /// Returns a text; an empty one is not sent.
    pub fn text(&self, field: u64) -> String {
        match self.find(field) {
            Some(Value::Bytes(value)) => String::from_utf8_lossy(value).into_owned(),
            _ => String::new(),
        }
    }

    /// Returns all messages of a repeated field.
    pub fn messages(&self, field: u64) -> Result<Vec<Self>> {
        let found = self.0.iter().filter_map(|(number, value)| match value {
            Value::Bytes(value) if *number == field => Some(Self::decode(value)),
            _ => None,
        });
        found.collect()
    }

    /// Returns a message in this one.
    pub fn message(&self, field: u64) -> Result<Self> {
        match self.find(field) {
            Some(Value::Bytes(value)) => Self::decode(value),
            _ => bail!("there is no message {field} in {self:?}"),
        }
    }
}

fn varint(bytes: &mut &[u8]) -> Result<u64> {
    let mut value = 0;
    for shift in (0..u64::BITS).step_by(7) {
        let (&byte, rest) = bytes.split_first().context("a number has no end")?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    bail!("a number is too long")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_pass() {
        let inner = Message::default().number(1, 300).text(15, "a");
        let sent = Message::default().message(2, &inner).number(16, u64::MAX);
        let found = Fields::decode(sent.encoded()).unwrap();
        assert_eq!(found.number(16), u64::MAX);
        let found = found.message(2).unwrap();
        assert_eq!((found.number(1), found.text(15), found.number(9)), (300, "a".to_owned(), 0));
        for length in 1..sent.encoded().len() {
            let cut = Fields::decode(&sent.encoded()[..length]);
            assert!(cut.is_err() || cut.unwrap().find(16).is_none(), "{length} bytes");
        }
    }
}
