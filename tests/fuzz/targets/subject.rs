//! Names of nodes, and subjects of the bus.

use ringwatch::cluster::subject::{ROOT, Topic, name, parse, token};

/// The longest name that a subject can hold, in bytes.
const NAME_MAX: usize = 128;

pub(super) fn check(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let written = token(&text);
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'=');
    assert!(!written.is_empty() && written.bytes().all(plain), "{written:?} is no token");
    assert!(written.len() <= 3 * NAME_MAX, "{} bytes", written.len());
    if !text.is_empty() && text.len() <= NAME_MAX && text != "\0" {
        assert_eq!(name(&written), text, "a token names its node");
    }
    for topic in [Topic::Node, Topic::Bucket(0), Topic::Bucket(15)] {
        let subject = topic.of(&text);
        assert_eq!(parse(&subject), Some((None, &*written, topic)), "{subject}");
        let rest = subject.strip_prefix(ROOT).unwrap();
        let mapped = format!("{ROOT}.part.7{rest}");
        assert_eq!(parse(&mapped), Some((Some(7), &*written, topic)), "{mapped}");
    }
    // Any subject: what is understood is one of ours.
    if let Some((_, token, _)) = parse(&text) {
        assert!(text.contains(token) && !token.contains('.'), "{text:?}");
        name(token);
    }
}
