//! The bucket: time that may be spent, and what it is enough for.

use super::{DEEP_NS, FILLED_NS, FIRST_NS, Governor, LOOKED_NS, RAISED_NS, RUN_COST_NS, SHIFT_MAX, TOKENS};

impl Governor {
    /// The first tokens.
    pub(crate) fn begin(&self, now_ns: u64) {
        self.set(TOKENS, self.income(FIRST_NS));
        self.set(FILLED_NS, now_ns);
        self.set_schedule();
    }

    pub(super) fn income(&self, elapsed_ns: u64) -> u64 {
        elapsed_ns.saturating_mul(self.budget_ppm) / 1_000_000
    }

    /// The tokens of a full bucket: they pay a run however small the budget.
    fn depth(&self) -> u64 {
        self.income(DEEP_NS).max(RUN_COST_NS)
    }

    /// How long an empty bucket takes to fill up, in ns.
    pub(super) fn filled_after_ns(budget_ppm: u64) -> u64 {
        (RUN_COST_NS * 1_000_000).checked_div(budget_ppm).map_or(u64::MAX, |ns| ns.max(DEEP_NS))
    }

    /// Fills up the bucket and returns its tokens.
    pub(super) fn fill(&self, now_ns: u64) -> i64 {
        let (Some(tokens), Some(filled)) = (self.words.get(TOKENS), self.words.get(FILLED_NS)) else {
            return i64::MIN;
        };
        let last = filled.get();
        let have = tokens.get() as i64;
        let elapsed = now_ns.saturating_sub(last);
        // Tokens of a few ns would be cut off.
        if elapsed < 10_000 {
            return have;
        }
        // One thread books an interval; a payment made meanwhile is kept.
        if filled.replace(last, now_ns) {
            let more = self.income(elapsed) as i64;
            let room = (self.depth() as i64).saturating_sub(have).max(0);
            tokens.add(more.min(room) as u64);
        }
        tokens.get() as i64
    }

    pub(super) fn pay(&self, cost_ns: u64) {
        if let Some(tokens) = self.words.get(TOKENS) {
            tokens.add(cost_ns.wrapping_neg());
        }
    }

    /// [`Self::afford`], once for each number.
    pub(super) fn decided(&self, number: u64, cost_ns: u64, which: usize, cache: usize, now_ns: u64) -> bool {
        let last = self.get(cache);
        // A refusal does not outlive an empty bucket: a communicator of sends and receives stays at one number.
        if last >> 1 == number + 1 && (last & 1 == 1 || self.fill(now_ns) < self.depth() as i64) {
            return last & 1 == 1;
        }
        let yes = self.afford(cost_ns, which, now_ns);
        self.set(cache, (number + 1) << 1 | u64::from(yes));
        yes
    }

    /// True when there are tokens for what is due; fewer or more is due from now on.
    pub(super) fn afford(&self, cost_ns: u64, which: usize, now_ns: u64) -> bool {
        let have = self.fill(now_ns);
        let shift = self.get(which);
        if have < cost_ns as i64 {
            // Tracks of transfers are at different runs: what cannot be paid is asked for again and again, before tokens
            // can have come.
            if self.income(now_ns.saturating_sub(self.get(RAISED_NS))) >= cost_ns {
                self.set(RAISED_NS, now_ns);
                self.set(which, (shift + 1).min(SHIFT_MAX));
                self.set_schedule();
            }
            return false;
        }
        if have >= self.depth() as i64 {
            self.more(which);
        }
        true
    }

    /// More is due from now on.
    pub(super) fn more(&self, which: usize) {
        self.set(which, self.get(which).saturating_sub(1));
        self.set_schedule();
    }

    /// True when it is time to look whether more can be due.
    #[inline]
    pub(super) fn may_rest(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.get(LOOKED_NS)) >= self.filled_after_ns
    }

    /// More is due where the bucket is nearly full, CUDA events apart, though nothing was due: so much less was as the job
    /// was quicker before.
    #[cold]
    pub(super) fn rest(&self, which: usize, now_ns: u64) {
        self.set(LOOKED_NS, now_ns);
        if self.fill(now_ns) >= (self.depth() / 4 * 3) as i64 {
            self.more(which);
        }
    }
}
