//! The reader of segments: words that a job wrote.

#[path = "../../../plugin/wire/tests/support/mod.rs"]
mod support;

use ringwatch_wire::layout::{FORMAT_VERSION, Geometry, HEADER_WORDS, LineRings, MAGIC, Region, head};
use ringwatch_wire::ring::Segment;
use ringwatch_wire::sync::Word;

/// The bytes as they are; then behind an honest magic and version; then as slots of an honest geometry: nobody guesses
/// those by flipping bits.
pub(super) fn check(bytes: &[u8]) {
    let words = support::words(bytes);
    let found = support::walk(&words);
    if words.len() > HEADER_WORDS {
        // Formats before the third say nothing of lines; those of the third have other heads.
        let version = words[head::VERSION].get() & 0xffff_ffff;
        let has_other_heads = version == 3 && words[head::LINES].get() != 0;
        if version < 3 {
            words[head::LINES].set(0);
            words[head::LINES_SHAPE].set(0);
        }
        words[head::MAGIC].set(MAGIC);
        words[head::VERSION].set(u64::from(FORMAT_VERSION) | (HEADER_WORDS as u64) << 32);
        let newest = support::walk(&words);
        assert!(found.is_err() || has_other_heads || newest.is_ok(), "the newest version is refused");
    }
    if bytes.len() > 8 {
        let geometry =
            Geometry::new([bytes[0], bytes[1], bytes[2], bytes[3], bytes[4]].map(|b| u32::from(b % 5)))
                .with_lines(LineRings::new(1 + u32::from(bytes[5] % 3), u32::from(bytes[6] % 5)));
        let given = support::words(bytes);
        let len = (geometry.bytes() / 8) as usize;
        let words: Vec<Word> = given.iter().cycle().take(len).map(|w| Word::new(w.get())).collect();
        let segment = Segment::new(&words, &geometry);
        segment.format(&geometry);
        segment.open_for_readers();
        for (i, region) in Region::ALL.iter().enumerate() {
            segment.set(region.next(), given[i % given.len()].get());
        }
        support::walk(&words).expect("an honest geometry opens");
    }
}
