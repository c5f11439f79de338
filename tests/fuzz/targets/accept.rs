//! Which format of the metrics a scraper gets, by its `Accept` header.

use ringwatch::export::prometheus::{Format, negotiated};

pub(super) fn check(bytes: &[u8]) {
    let header = String::from_utf8_lossy(bytes);
    let (all, text_only) = (negotiated(Some(&header), true), negotiated(Some(&header), false));
    assert_ne!(text_only, Format::Protobuf, "{header:?}: it is not offered");
    for format in [all, text_only] {
        let media = format.content_type().split(';').next().unwrap();
        let named = header.to_ascii_lowercase().contains(media);
        assert!(named || format == Format::Text, "{header:?} does not name {media}");
    }
    // What else is asked for, and not offered, changes nothing.
    assert_eq!(negotiated(Some(&format!("{header},image/png")), true), all, "{header:?}");
}
