//! The open HTTP connections, and which one is closed where a new one has no place.
//!
//! The peer that has the most connections loses one: a flood displaces its own. Of a peer's connections the oldest without
//! a whole request goes first.

use super::connections::{Closed, Connections};
use super::tcp_peer::TcpPeer;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::task::{AbortHandle, Id};

/// The bounds of a server.
#[derive(Debug, Clone, Copy)]
pub(in crate::runtime) struct Bounds {
    /// Connections at once.
    pub(super) connections: usize,
    /// Bytes of all answers that are being sent.
    pub(super) answer_bytes: u64,
    /// The longest that the head of a request may take to come.
    pub(super) head: Duration,
    /// The longest that a connection lives.
    pub(super) deadline: Duration,
}

impl Bounds {
    /// The usual times, and so many connections.
    pub(in crate::runtime) fn new(connections: usize) -> Self {
        let (head, deadline) = (Duration::from_secs(5), Duration::from_secs(30));
        Bounds { connections, answer_bytes: 16 << 20, head, deadline }
    }
}

/// The state of the open connections.
#[derive(Debug)]
pub(super) struct HttpConnections {
    pub(super) bounds: Bounds,
    pub(super) counters: Arc<Connections>,
    /// By age, the oldest first.
    open: Mutex<BTreeMap<u64, Connection>>,
}

#[derive(Debug)]
struct Connection {
    task: AbortHandle,
    peer: TcpPeer,
    /// True once the request's head has come.
    requested: bool,
    /// The render that is its answer, and its bytes, from when they are known. Connections share a render's memory.
    answer: Option<(u64, u64)>,
}

/// The open connections while no other task can change them.
pub(super) struct Locked<'a>(MutexGuard<'a, BTreeMap<u64, Connection>>);

impl Locked<'_> {
    pub(super) fn insert(&mut self, number: u64, task: AbortHandle, peer: TcpPeer) {
        self.0.insert(number, Connection { task, peer, requested: false, answer: None });
    }
}

impl HttpConnections {
    pub(super) fn new(bounds: Bounds, counters: Arc<Connections>) -> Self {
        HttpConnections { bounds, counters, open: Mutex::default() }
    }

    pub(super) fn lock(&self) -> Locked<'_> {
        Locked(self.open())
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, Connection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has(&self, task: Id) -> bool {
        self.open().values().any(|c| c.task.id() == task)
    }

    pub(super) fn ended(&self, task: Id) {
        self.open().retain(|_, c| c.task.id() != task);
    }

    pub(super) fn requested(&self, number: u64) {
        if let Some(connection) = self.open().get_mut(&number) {
            connection.requested = true;
        }
    }

    /// Where all places are taken, closes one connection of the peer that has the most.
    pub(super) fn displaced(&self) -> Option<Id> {
        let open = self.open();
        if open.len() < self.bounds.connections {
            return None;
        }
        let peer = greediest(open.values().map(|c| (c.peer, 1)))?;
        let of_peer = || open.values().filter(|c| c.peer == peer);
        let connection = of_peer().find(|c| !c.requested).or_else(|| of_peer().next())?;
        Some(self.displace(connection))
    }

    /// Takes note of an answer. Where all together are too long, closes connections of the peers that leave most unread,
    /// the oldest first.
    pub(super) fn answers(&self, number: u64, render: u64, bytes: u64) {
        let mut open = self.open();
        if let Some(connection) = open.get_mut(&number) {
            connection.answer = Some((render, bytes));
        }
        while answer_bytes(&open) > self.bounds.answer_bytes {
            let unread = |(n, c): (&u64, &Connection)| Some((c.peer, c.answer.filter(|_| *n != number)?.1));
            let Some(peer) = greediest(open.iter().filter_map(unread)) else { return };
            let of_peer =
                |(n, c): &(&u64, &mut Connection)| **n != number && c.peer == peer && c.answer.is_some();
            let Some((_, connection)) = open.iter_mut().find(of_peer) else { return };
            connection.answer = None;
            self.displace(connection);
        }
    }

    fn displace(&self, connection: &Connection) -> Id {
        self.counters.closed(Closed::Displaced);
        connection.task.abort();
        connection.task.id()
    }
}

/// The memory of all answers that are being sent.
fn answer_bytes(open: &BTreeMap<u64, Connection>) -> u64 {
    let renders: BTreeMap<u64, u64> = open.values().filter_map(|c| c.answer).collect();
    renders.values().sum()
}

/// The peer with the greatest sum; of equals the one that comes first.
fn greediest(shares: impl Iterator<Item = (TcpPeer, u64)>) -> Option<TcpPeer> {
    let mut sums: BTreeMap<TcpPeer, (u64, Reverse<usize>)> = BTreeMap::new();
    for (place, (peer, share)) in shares.enumerate() {
        sums.entry(peer).or_insert((0, Reverse(place))).0 += share;
    }
    sums.into_iter().max_by_key(|(_, sum)| *sum).map(|(peer, _)| peer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::task::JoinSet;

    const SCRAPER: TcpPeer = TcpPeer::User(0);
    const FLOOD: TcpPeer = TcpPeer::User(7);

    /// Connections that never end by themselves.
    struct Table {
        table: HttpConnections,
        tasks: JoinSet<()>,
        last: u64,
    }

    impl Table {
        fn new(bounds: Bounds, peers: &[(TcpPeer, u64)]) -> Self {
            let table = HttpConnections::new(bounds, Arc::default());
            let mut table = Table { table, tasks: JoinSet::new(), last: 0 };
            for (peer, count) in peers {
                (0..*count).for_each(|_| table.accept(*peer));
            }
            table
        }

        fn accept(&mut self, peer: TcpPeer) {
            self.last += 1;
            let task = self.tasks.spawn(std::future::pending());
            self.table.lock().insert(self.last, task, peer);
        }

        /// The connection that is closed for a new one.
        fn displaced(&self) -> Option<u64> {
            let task = self.table.displaced()?;
            let number = *self.table.open().iter().find(|(_, c)| c.task.id() == task).unwrap().0;
            self.table.ended(task);
            Some(number)
        }

        fn with_answers(&self) -> Vec<u64> {
            self.table.open().iter().filter(|(_, c)| c.answer.is_some()).map(|(n, _)| *n).collect()
        }
    }

    #[tokio::test]
    async fn a_flood_displaces_its_own_connections_and_half_sent_ones_first() {
        let mut table = Table::new(Bounds::new(6), &[(SCRAPER, 2), (FLOOD, 4)]);
        [3, 4, 6].into_iter().for_each(|n| table.table.requested(n));
        for wanted in [5, 3, 4, 6] {
            assert_eq!(table.displaced(), Some(wanted));
            assert_eq!(table.displaced(), None, "there is a place");
            table.accept(FLOOD);
            table.table.requested(table.last);
        }
    }

    #[tokio::test]
    async fn of_peers_with_equally_many_the_oldest_connection_goes() {
        let peers: Vec<_> = (1..=5).map(|n| (TcpPeer::User(n), 1)).collect();
        assert_eq!(Table::new(Bounds::new(5), &peers).displaced(), Some(1));
    }

    #[tokio::test]
    async fn unread_answers_share_a_renders_memory_and_who_leaves_most_unread_goes() {
        let bounds = Bounds { answer_bytes: 30, ..Bounds::new(100) };
        let table = Table::new(bounds, &[(SCRAPER, 1), (FLOOD, 9)]);
        table.table.answers(1, 1, 10);
        // The scraper's render is the flood's as well.
        (2..=6).for_each(|n| table.table.answers(n, 1, 10));
        table.table.answers(7, 2, 10);
        table.table.answers(8, 3, 10);
        assert_eq!(table.with_answers(), [1, 2, 3, 4, 5, 6, 7, 8], "three renders have room");
        table.table.answers(9, 4, 10);
        assert_eq!(table.with_answers(), [1, 8, 9], "the flood's, until a render is free");
    }
}
