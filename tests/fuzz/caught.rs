//! Panics as texts. While an input is made smaller the same panic comes a thousand times, and one is enough to read.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    static CATCHING: Cell<bool> = const { Cell::new(false) };
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}
static HOOK: Once = Once::new();

/// Does something; where it panics, with what words and where.
pub(crate) fn caught(work: impl FnOnce()) -> Result<(), String> {
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if CATCHING.get() {
                LAST.with_borrow_mut(|last| *last = info.to_string());
            } else {
                usual(info);
            }
        }));
    });
    CATCHING.set(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    CATCHING.set(false);
    done.map_err(|_| LAST.take())
}
