//! Series under a budget: what has room has a series of its own, the rest shares one.

use std::collections::HashMap;
use std::hash::Hash;

/// Values by key.
#[derive(Debug, Clone)]
pub(super) struct Store<K, V> {
    series: HashMap<K, Series<V>>,
    overflow: Option<V>,
    budget: usize,
    folded: u64,
}

#[derive(Debug, Clone)]
struct Series<V> {
    value: V,
    /// Changed since the last look.
    touched: bool,
    /// The last look before which it had changed, host monotonic ns.
    seen_ns: u64,
}

impl<K: Eq + Hash, V: Default> Store<K, V> {
    pub(super) fn new(budget: usize) -> Self {
        Store { series: HashMap::new(), overflow: None, budget, folded: 0 }
    }

    /// The value to change: the key's own, or that of all for which there is no room.
    pub(super) fn at(&mut self, key: K) -> &mut V {
        self.at_times(key, 1)
    }

    /// The same for something that was counted so many times.
    pub(super) fn at_times(&mut self, key: K, times: u64) -> &mut V {
        if self.series.len() >= self.budget && !self.series.contains_key(&key) {
            self.folded += times;
            return self.overflow.get_or_insert_default();
        }
        let new = || Series { value: V::default(), touched: true, seen_ns: 0 };
        let series = self.series.entry(key).or_insert_with(new);
        series.touched = true;
        &mut series.value
    }

    /// Keeps a series that has not changed and still says something.
    pub(super) fn touch(&mut self, key: &K) {
        if let Some(s) = self.series.get_mut(key) {
            s.touched = true;
        }
    }

    /// Lets go what has not changed for some time; its room is for others.
    pub(super) fn expire(&mut self, now_ns: u64, idle_ns: u64) {
        self.series.retain(|_, s| {
            if std::mem::take(&mut s.touched) {
                s.seen_ns = now_ns;
            }
            now_ns.saturating_sub(s.seen_ns) <= idle_ns
        });
    }

    /// All that have a series of their own.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.series.iter().map(|(k, s)| (k, &s.value))
    }

    /// The series that the others share.
    pub(super) fn overflow(&self) -> Option<&V> {
        self.overflow.as_ref()
    }

    pub(super) fn budget(&self) -> usize {
        self.budget
    }

    pub(super) fn len(&self) -> usize {
        self.series.len() + usize::from(self.overflow.is_some())
    }

    /// How often something was counted in the shared one.
    pub(super) fn folded(&self) -> u64 {
        self.folded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beyond_the_budget_is_folded_counted_and_gets_room_later() {
        let mut s: Store<u32, u64> = Store::new(2);
        for key in [1, 2, 3, 4, 1] {
            *s.at(key) += 1;
        }
        assert_eq!((s.len(), s.folded(), s.overflow()), (3, 2, Some(&2)));
        s.expire(10, 5);
        *s.at(2) += 1;
        s.expire(14, 5);
        assert_eq!(s.len(), 3, "1 has been idle for 4 only");
        s.expire(16, 5);
        let left: Vec<_> = s.iter().collect();
        assert_eq!(left, [(&2, &2)]);
        *s.at(3) += 1;
        assert_eq!(s.iter().count(), 2, "there is room again");
        assert_eq!(s.overflow(), Some(&2), "what was shared stays shared");
    }
}
