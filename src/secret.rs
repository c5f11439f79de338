//! Settings that no output may show: URLs with a user and a password in them, and values of headers.
//!
//! Whatever prints them, `Debug`, `Display` and serde included, prints a mask. `exposed` is the one way to the value, for
//! the place where a client is built; `serialize_exposed` is for settings that are read back or compared.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize, Serializer};
use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

/// The text in a secret's place.
pub const MASK: &str = "***";

thread_local! {
    static EXPOSED: Cell<bool> = const { Cell::new(false) };
}

/// Serializes with the values of secrets in it. Only for what stays in this process.
pub(crate) fn serialize_exposed<T>(serialize: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            EXPOSED.set(self.0);
        }
    }
    let _restore = Restore(EXPOSED.replace(true));
    serialize()
}

/// A URL that may hold a user, a password or a token. It prints as `nats://***@host:4222`.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct SecretUrl(String);

/// A text that is a secret as a whole. It prints as `***`.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct SecretText(String);

impl SecretUrl {
    /// The value, for the client that connects with it.
    pub fn exposed(&self) -> &str {
        &self.0
    }

    /// True where it begins with this, `tls://` for example.
    pub fn has_scheme(&self, scheme: &str) -> bool {
        self.0.starts_with(scheme)
    }

    /// The URL without user and password, and these, decoded.
    pub fn split_user(&self) -> (SecretUrl, Option<(SecretText, SecretText)>) {
        let (scheme, user, rest) = parts(&self.0);
        let Some(user) = user else { return (self.clone(), None) };
        let (name, password) = user.split_once(':').unwrap_or((user, ""));
        let secret = |text| SecretText(decoded(text));
        (SecretUrl(format!("{scheme}{rest}")), Some((secret(name), secret(password))))
    }

    /// A text of somebody else, an error for example, in which the mask replaces what is secret in this URL.
    #[must_use]
    pub fn hide_in(&self, text: &str) -> String {
        let (_, user, rest) = parts(&self.0);
        let mut hidden = text.replace(&self.0, &self.to_string());
        let password = user.and_then(|u| u.split_once(':')).map(|(_, password)| password);
        let query = rest.split_once('?').map(|(_, query)| query);
        let decoded = password.map(decoded);
        for secret in [user, password, decoded.as_deref(), query].into_iter().flatten() {
            if !secret.is_empty() {
                hidden = hidden.replace(secret, MASK);
            }
        }
        hidden
    }
}

impl SecretText {
    /// The value, for the request that carries it.
    pub fn exposed(&self) -> &str {
        &self.0
    }
}

/// Scheme with `://`, user and password, and the rest. Passwords that were not encoded may hold any letter, so the last `@`
/// ends them.
fn parts(url: &str) -> (&str, Option<&str>, &str) {
    let (scheme, rest) = url.find("://").map_or(("", url), |at| url.split_at(at + 3));
    match rest.rsplit_once('@') {
        Some((user, rest)) => (scheme, Some(user), rest),
        None => (scheme, None, rest),
    }
}

/// Text in which `%41` stands for a byte.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        let hex = more.get(..2).and_then(|h| std::str::from_utf8(h).ok());
        match hex.and_then(|h| u8::from_str_radix(h, 16).ok()).filter(|_| *first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &more[2..];
            }
            None => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A text in which the user and password of every URL are masked.
pub fn mask_urls(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        out += before;
        let end = after.find(char::is_whitespace).unwrap_or(after.len());
        // A quote ends the URL unless it is in its password, which the last `@` ends.
        let host = after[..end].rfind('@').unwrap_or(0);
        let quote = after[host..end].find(|c: char| "\"'`".contains(c));
        let (url, more) = after.split_at(quote.map_or(end, |at| host + at));
        match url.rsplit_once('@') {
            Some((_, host)) => out += &format!("{MASK}@{host}"),
            None => out += url,
        }
        rest = more;
    }
    if out.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(out + rest) }
}

impl fmt::Display for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, user, rest) = parts(&self.0);
        let (place, query) = rest.split_once('?').map_or((rest, ""), |(place, _)| (place, "?***"));
        let user = user.map_or("", |_| "***@");
        write!(f, "{scheme}{user}{place}{query}")
    }
}

impl fmt::Display for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

/// The parts that both kinds have: they print their mask, and come from any text.
macro_rules! secret {
    ($name:ident) => {
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "\"{self}\"")
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                if EXPOSED.get() { serializer.serialize_str(&self.0) } else { serializer.collect_str(self) }
            }
        }

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            /// `writeOnly` is JSON Schema's mark of a secret.
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({"type": "string", "writeOnly": true})
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                $name(text)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                $name(text.to_owned())
            }
        }
    };
}

secret!(SecretUrl);
secret!(SecretText);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_prints_a_url_prints_its_secret() {
        for (url, shown) in [
            ("nats://host:4222", "nats://host:4222"),
            ("nats://user:s3cr3t@host:4222", "nats://***@host:4222"),
            ("nats://s3cr3t@host", "nats://***@host"),
            ("user:s3cr3t@host:4222", "***@host:4222"),
            ("tls://us/er:s3c@s3cr3t@host:4222", "tls://***@host:4222"),
            ("http://host/otlp?token=s3cr3t", "http://host/otlp?***"),
            ("http://user:s3cr3t@[::1]:4318/x", "http://***@[::1]:4318/x"),
        ] {
            let secret = SecretUrl::from(url);
            assert_eq!(secret.to_string(), shown);
            assert_eq!(format!("{secret:?}"), format!("\"{shown}\""));
            assert_eq!(serde_json::to_string(&secret).expect("text"), format!("\"{shown}\""));
            assert_eq!(secret.exposed(), url);
            assert!(!secret.hide_in(&format!("cannot reach {url}")).contains("s3cr3t"));
        }
    }

    #[test]
    fn values_are_written_where_that_is_asked_for_and_then_no_more() {
        let secrets = (SecretUrl::from("nats://u:p@h"), SecretText::from("token"));
        let masked = || serde_json::to_string(&secrets).expect("text");
        assert_eq!(serialize_exposed(masked), r#"["nats://u:p@h","token"]"#);
        let panicked = std::panic::catch_unwind(|| serialize_exposed(|| panic!("in the middle")));
        assert!(panicked.is_err());
        assert_eq!(masked(), r#"["nats://***@h","***"]"#);
        assert_eq!(format!("{secrets:?}"), r#"("nats://***@h", "***")"#);
    }

    #[test]
    fn user_and_password_are_taken_apart_and_decoded() {
        let (url, user) = SecretUrl::from("http://us%40er:p%3Aw@h:4318/x").split_user();
        assert_eq!(url.exposed(), "http://h:4318/x");
        let (name, password) = user.expect("a user");
        assert_eq!((name.exposed(), password.exposed()), ("us@er", "p:w"));
        assert_eq!(SecretUrl::from("http://h").split_user().1, None);
    }

    #[test]
    fn errors_of_others_are_masked_too() {
        let url = SecretUrl::from("nats://user:p%40ss@host:99999");
        for text in ["bad URL nats://user:p%40ss@host:99999", "no user user:p%40ss", "password p@ss is wrong"]
        {
            let hidden = url.hide_in(text);
            assert!(!hidden.contains("p%40ss") && !hidden.contains("p@ss"), "{hidden}");
        }
        let text = "reached http://a:b@h:1/x, \"tls://t0ken@i\" and nats://plain:4222";
        assert_eq!(mask_urls(text), "reached http://***@h:1/x, \"tls://***@i\" and nats://plain:4222");
        assert_eq!(mask_urls("nothing here"), "nothing here");
        assert_eq!(mask_urls("'nats://u:s\"3c'r`et@h' is wrong"), "'nats://***@h' is wrong");
        // More than needed is masked where an address follows without a space.
        assert_eq!(mask_urls("\"http://h/x\",\"a@b\""), "\"http://***@b\"");
    }
}
