//! Writer of ONNX models (`onnx.proto`): the messages and fields of static graphs, in the wire format of protocol buffers.
//!
//! ```text
//! field   varint(number << 3 | type) ‖ varint                    type 0
//!         varint(number << 3 | type) ‖ varint(length) ‖ bytes    type 2: strings and messages
//! ```

/// Versions of the model format and of the operators, as in ONNX 1.13.
const IR_VERSION: u64 = 8;
const OPERATORS: u64 = 18;

/// An encoded message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(mut self, field: u64, value: u64) -> Self {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    fn bytes(mut self, field: u64, bytes: &[u8]) -> Self {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    fn text(self, field: u64, text: &str) -> Self {
        self.bytes(field, text.as_bytes())
    }

    fn message(self, field: u64, message: &Self) -> Self {
        self.bytes(field, &message.0)
    }

    /// Adds a repeated field.
    fn numbers(self, field: u64, values: &[u64]) -> Self {
        let values = values.iter();
        values.fold(self, |message, &value| message.number(field, value))
    }
}

/// Element types with ONNX's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    F32 = 1,
    U8 = 2,
    I8 = 3,
    I32 = 6,
    I64 = 7,
    F16 = 10,
}

/// The value of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attribute<'a> {
    Number(u64),
    Text(&'a str),
    Numbers(&'a [u64]),
}

impl Attribute<'_> {
    fn message(self, name: &str) -> Message {
        let named = Message::default().text(1, name);
        let (message, kind) = match self {
            Self::Number(value) => (named.number(3, value), 2),
            Self::Text(value) => (named.text(4, value), 3),
            Self::Numbers(values) => (named.numbers(8, values), 7),
        };
        message.number(20, kind)
    }
}

/// A graph. Values have names, and nodes are in topological order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Graph {
    fields: Message,
    /// Prefix of the name of every added value.
    prefix: String,
}

impl Graph {
    /// An empty graph.
    pub fn new(name: &str) -> Self {
        Self {
            fields: Message::default().text(2, name),
            prefix: String::new(),
        }
    }

    /// Sets the prefix of names for values added from now on, so that the same nodes can be added for other inputs.
    pub fn prefixed(self, prefix: String) -> Self {
        Self { prefix, ..self }
    }

    fn with(self, field: u64, message: &Message) -> Self {
        Self {
            fields: self.fields.message(field, message),
            ..self
        }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Adds an input.
    pub fn input(self, name: &str, element: Element, shape: &[usize]) -> Self {
        let value = value(&self.name(name), element, shape);
        self.with(11, &value)
    }

    /// Adds an output.
    pub fn output(self, name: &str, element: Element, shape: &[usize]) -> Self {
        let value = value(&self.name(name), element, shape);
        self.with(12, &value)
    }

    /// Adds a constant of one byte.
    pub fn byte(self, name: &str, value: u8) -> Self {
        self.constant(name, Element::U8, &[], &[value])
    }

    /// Adds a constant of one signed byte.
    pub fn signed_byte(self, name: &str, value: i8) -> Self {
        self.constant(name, Element::I8, &[], &value.to_le_bytes())
    }

    /// Adds a constant of one float.
    pub fn float(self, name: &str, value: f32) -> Self {
        self.constant(name, Element::F32, &[], &value.to_le_bytes())
    }

    /// Adds a constant list of numbers.
    pub fn list(self, name: &str, values: &[usize]) -> Self {
        let bytes = values.iter().flat_map(|&v| (v as u64).to_le_bytes());
        let bytes: Vec<u8> = bytes.collect();
        self.constant(name, Element::I64, &[values.len() as u64], &bytes)
    }

    fn constant(self, name: &str, element: Element, shape: &[u64], bytes: &[u8]) -> Self {
        let tensor = Message::default().numbers(1, shape);
        let tensor = tensor.number(2, element as u64);
        let tensor = tensor.text(8, &self.name(name)).bytes(9, bytes);
        self.with(5, &tensor)
    }

    /// Adds a node with one output.
    pub fn node(
        self,
        operator: &str,
        inputs: &[&str],
        output: &str,
        attribute: Option<(&str, Attribute<'_>)>,
    ) -> Self {
        let mut node = Message::default();
        for input in inputs {
            node = node.text(1, &self.name(input));
        }
        let output = self.name(output);
        node = node.text(2, &output).text(3, &output).text(4, operator);
        if let Some((name, attribute)) = attribute {
            node = node.message(5, &attribute.message(name));
        }
        self.with(1, &node)
    }

    /// Encodes a model with this graph.
    pub fn model(&self) -> Vec<u8> {
        let operators = Message::default().text(1, "").number(2, OPERATORS);
        let model = Message::default()
            .number(1, IR_VERSION)
            .text(2, "emberflow");
        model.message(7, &self.fields).message(8, &operators).0
    }
}

/// Name, type and shape of a value.
fn value(name: &str, element: Element, shape: &[usize]) -> Message {
    let mut dimensions = Message::default();
    for &size in shape {
        let dimension = Message::default().number(1, size as u64);
        dimensions = dimensions.message(1, &dimension);
    }
    let tensor = Message::default().number(1, element as u64);
    let tensor = tensor.message(2, &dimensions);
    let tensor = Message::default().message(1, &tensor);
    Message::default().text(1, name).message(2, &tensor)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples in the documentation of the encoding.
    #[test]
    fn fields_are_those_of_protocol_buffers() {
        let encoded = Message::default().number(1, 150);
        assert_eq!(encoded.0, [0x08, 0x96, 0x01]);
        let encoded = Message::default().text(2, "testing");
        assert_eq!(encoded.0, b"\x12\x07testing");
        let encoded = Message::default().message(3, &Message::default().number(1, 150));
        assert_eq!(encoded.0, [0x1a, 0x03, 0x08, 0x96, 0x01]);
        let encoded = Message::default().numbers(5, &[1, 2, 300]);
        assert_eq!(encoded.0, [0x28, 1, 0x28, 2, 0x28, 0xac, 0x02]);
    }

    /// Bytes written by the Python package `onnx`.
    #[test]
    fn models_are_those_of_onnx() {
        let value = value("x", Element::U8, &[2, 300]);
        assert_eq!(
            value.0,
            b"\x0a\x01x\x12\x0f\x0a\x0d\x08\x02\x12\x09\x0a\x02\x08\x02\x0a\x03\x08\xac\x02"
        );
        let graph = Graph::new("g").node(
            "Transpose",
            &["a"],
            "b",
            Some(("perm", Attribute::Numbers(&[1, 0]))),
        );
        let node =
            b"\x0a\x01a\x12\x01b\x1a\x01b\x22\x09Transpose*\x0d\x0a\x04perm@\x01@\x00\xa0\x01\x07";
        let mut expected = b"\x12\x01g\x0a".to_vec();
        expected.push(node.len() as u8);
        expected.extend_from_slice(node);
        assert_eq!(graph.fields.0, expected);
        let model = graph.model();
        assert!(model.starts_with(b"\x08\x08\x12\x09emberflow"));
        assert!(model.ends_with(b"\x42\x04\x0a\x00\x10\x12"));
    }
}
