//! JSON that keeps the order of its keys.

use serde::Deserialize;
use serde::de::{MapAccess, SeqAccess, Visitor};
use std::fmt;

/// JSON that keeps the order of its keys, which the documented schema fixes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    pub(crate) fn keys(&self) -> Vec<&str> {
        match self {
            Json::Object(o) => o.iter().map(|(k, _)| k.as_str()).collect(),
            other => panic!("{other:?} is no object"),
        }
    }

    pub(crate) fn get(&self, key: &str) -> &Json {
        match self {
            Json::Object(o) => o.iter().find(|(k, _)| k == key).map_or(&Json::Null, |(_, v)| v),
            other => panic!("{other:?} is no object"),
        }
    }

    pub(crate) fn list(&self) -> &[Json] {
        match self {
            Json::List(l) => l,
            other => panic!("{other:?} is no list"),
        }
    }

    pub(crate) fn text(&self) -> &str {
        match self {
            Json::Text(t) => t,
            other => panic!("{other:?} is no text"),
        }
    }

    pub(crate) fn number(&self) -> f64 {
        match self {
            Json::Number(n) => *n,
            other => panic!("{other:?} is no number"),
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Json;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }
            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }
            fn visit_bool<E>(self, b: bool) -> Result<Json, E> {
                Ok(Json::Bool(b))
            }
            fn visit_u64<E>(self, n: u64) -> Result<Json, E> {
                Ok(Json::Number(n as f64))
            }
            fn visit_i64<E>(self, n: i64) -> Result<Json, E> {
                Ok(Json::Number(n as f64))
            }
            fn visit_f64<E>(self, n: f64) -> Result<Json, E> {
                Ok(Json::Number(n))
            }
            fn visit_str<E>(self, s: &str) -> Result<Json, E> {
                Ok(Json::Text(s.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut a: A) -> Result<Json, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = a.next_element()? {
                    list.push(item);
                }
                Ok(Json::List(list))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut a: A) -> Result<Json, A::Error> {
                let mut object = Vec::new();
                while let Some(entry) = a.next_entry()? {
                    object.push(entry);
                }
                Ok(Json::Object(object))
            }
        }
        d.deserialize_any(Any)
    }
}
