//! The communicators by NCCL's pointers. The pointers are compared and never followed.

use ringwatch_wire::sync::Word;

/// Places; communicators are 256 at most.
const PLACES: usize = 1024;
/// Words the table needs.
pub(crate) const WORDS: usize = PLACES * 2;
const TRIES: usize = 64;

const EMPTY: u64 = 0;
/// Being filled in; no pointer is 1.
const TAKEN: u64 = 1;
/// Freed: searches go on past it.
const FREED: u64 = 2;

fn place(pointer: u64) -> usize {
    (pointer.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54) as usize
}

fn places(words: &[Word], pointer: u64) -> impl Iterator<Item = (&Word, &Word)> {
    (0..TRIES).filter_map(move |i| {
        let at = ((place(pointer) + i) & (PLACES - 1)) * 2;
        Some((words.get(at)?, words.get(at + 1)?))
    })
}

/// The communicator's ticket.
#[inline]
pub(crate) fn find(words: &[Word], pointer: u64) -> Option<u64> {
    if pointer <= FREED {
        return None;
    }
    for (key, ticket) in places(words, pointer) {
        match key.get_first() {
            k if k == pointer => return Some(ticket.get()),
            EMPTY => return None,
            _ => {}
        }
    }
    None
}

/// Enters a pointer, in place of what it meant before. False when there is no room.
pub(crate) fn enter(words: &[Word], pointer: u64, ticket: u64) -> bool {
    if pointer <= FREED {
        return false;
    }
    remove(words, pointer);
    for (key, value) in places(words, pointer) {
        let was = key.get();
        if (was == EMPTY || was == FREED) && key.replace(was, TAKEN) {
            value.set(ticket);
            key.set_last(pointer);
            return true;
        }
    }
    false
}

/// Forgets a pointer.
pub(crate) fn remove(words: &[Word], pointer: u64) {
    if pointer <= FREED {
        return;
    }
    for (key, _) in places(words, pointer) {
        match key.get_first() {
            k if k == pointer => {
                key.replace(k, FREED);
            }
            EMPTY => return,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_pointer_is_never_found() {
        let words: Vec<Word> = (0..WORDS).map(|_| Word::new(0)).collect();
        for bad in 0..3 {
            assert_eq!(find(&words, bad), None);
            remove(&words, bad);
        }
        words[0].set(FREED);
        assert_eq!(find(&words, FREED), None);
    }

    #[test]
    fn pointers_are_found_until_they_are_freed() {
        let words: Vec<Word> = (0..WORDS).map(|_| Word::new(0)).collect();
        for round in 0..100u64 {
            let pointer = |i: u64| 0x7f00_0000_0000 + round * 0x1000 + i * 64;
            for i in 0..256 {
                assert!(enter(&words, pointer(i), round * 1000 + i));
            }
            for i in 0..256 {
                assert_eq!(find(&words, pointer(i)), Some(round * 1000 + i));
                assert_eq!(find(&words, pointer(i) + 8), None);
            }
            for i in 0..256 {
                remove(&words, pointer(i));
                assert_eq!(find(&words, pointer(i)), None);
            }
        }
        for bad in 0..3 {
            assert!(!enter(&words, bad, 1));
            assert_eq!(find(&words, 0), None);
        }
    }
}
