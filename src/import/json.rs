//! JSON as a document.

use super::document::{Document, Id, Node, TooLarge};
use super::fault::Fault;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Reads one JSON document, which is nested 128 deep at most.
pub(super) fn read(bytes: &[u8]) -> Result<Document, Fault> {
    let mut document = Document::default();
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let root = Seed(&mut document).deserialize(&mut json).and_then(|root| json.end().map(|()| root));
    document.set_root(root.map_err(|e| Fault::at_line(e.line(), e.column(), e.to_string()))?);
    Ok(document)
}

/// Adds a value to the document while it is parsed.
struct Seed<'a>(&'a mut Document);

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Id;
    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Id, D::Error> {
        json.deserialize_any(self)
    }
}

fn kept<E: serde::de::Error>(id: Result<Id, TooLarge>) -> Result<Id, E> {
    id.map_err(|TooLarge| E::custom("it has more values than are read"))
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Id;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Id, E> {
        kept(self.0.add(Node::None))
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Id, E> {
        kept(self.0.add(Node::Bool(value)))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Id, E> {
        kept(self.0.add(Node::Int(value)))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Id, E> {
        let node = i64::try_from(value).map_or(Node::Float(value as f64), Node::Int);
        kept(self.0.add(node))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Id, E> {
        kept(self.0.add(Node::Float(value)))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Id, E> {
        kept(self.0.add_text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Id, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = items.next_element_seed(Seed(&mut *self.0))? {
            ids.push(id);
        }
        kept(self.0.add_list(ids))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Id, A::Error> {
        let mut ids = Vec::new();
        while let Some(key) = pairs.next_key_seed(Seed(&mut *self.0))? {
            ids.push(key);
            ids.push(pairs.next_value_seed(Seed(&mut *self.0))?);
        }
        kept(self.0.add_object(ids))
    }
}
