//! Where something belongs: node, job, user and communicator, as labels.

use crate::join::Join;
use crate::model::{CommId, Holder, SegmentId};
use std::collections::{HashMap, HashSet};

/// A container of Kubernetes, which has one process of a rank or more.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Container {
    pod: String,
    namespace: String,
    container: String,
}

impl Container {
    /// The names, in the order of the catalogue's labels; empty where one is not known.
    pub(super) fn names(&self) -> [&str; 3] {
        [&self.pod, &self.namespace, &self.container]
    }

    /// The container of a process, where a pod is known.
    fn of_process(join: &Join, segment: SegmentId) -> Option<Self> {
        let mut labels = join.labels(segment);
        let mut take = |name| labels.remove(name);
        let pod = take("k8s.pod.name")?;
        let (namespace, container) = (take("k8s.namespace.name"), take("k8s.container.name"));
        Some(Container {
            pod,
            namespace: namespace.unwrap_or_default(),
            container: container.unwrap_or_default(),
        })
    }
}

impl From<&Holder> for Container {
    fn from(h: &Holder) -> Self {
        Container { pod: h.pod.clone(), namespace: h.namespace.clone(), container: h.container.clone() }
    }
}

/// The labels.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Scope {
    /// The host.
    pub(super) node: String,
    /// The job's name.
    pub(super) job: String,
    /// The user of the job's processes, whose names are no other user's; empty where it is not known.
    pub(super) uid: String,
    /// The communicator's name, or its id where it has none; empty for what belongs to none.
    pub(super) communicator: String,
    /// The container of a rank; absent where none is known, and for what may belong to several.
    pub(super) container: Option<Container>,
}

/// A user's number as a label; empty where it is not known.
pub(super) fn uid_text(uid: Option<u32>) -> String {
    uid.map_or_else(String::new, |uid| uid.to_string())
}

/// Stands for a scope in keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ScopeId(u64);

/// A communicator, a process of it, and whether it is about that process alone.
type Asked = (Option<CommId>, Option<SegmentId>, bool);

/// The scopes in use. Communicators that share a name, a job, a user and a node share one.
#[derive(Debug, Default)]
pub(super) struct Scopes {
    ids: HashMap<Scope, ScopeId>,
    scopes: HashMap<ScopeId, Scope>,
    /// The scopes that were looked up since the last time that all was gathered; names may become known.
    known: HashMap<Asked, ScopeId>,
    next: u64,
}

impl Scopes {
    /// Of a communicator: on the node of a process, or of its first rank that is seen.
    pub(super) fn of(&mut self, join: &Join, comm: CommId, segment: Option<SegmentId>) -> ScopeId {
        self.look_up(join, (Some(comm), segment, false))
    }

    /// Of a rank of a communicator: with its container.
    pub(super) fn of_rank(&mut self, join: &Join, comm: CommId, segment: SegmentId) -> ScopeId {
        self.look_up(join, (Some(comm), Some(segment), true))
    }

    /// Of a process, whatever communicator.
    pub(super) fn of_process(&mut self, join: &Join, segment: SegmentId) -> ScopeId {
        self.look_up(join, (None, Some(segment), false))
    }

    /// Of a node alone.
    pub(super) fn of_node(&mut self, node: &str) -> ScopeId {
        self.id(Scope { node: node.to_owned(), ..Scope::default() })
    }

    fn look_up(&mut self, join: &Join, asked: Asked) -> ScopeId {
        if let Some(id) = self.known.get(&asked) {
            return *id;
        }
        let (comm, segment, is_rank) = asked;
        let communicator = comm.and_then(|c| join.communicator(c));
        let first = || communicator?.members().values().next().map(|m| m.record.segment);
        let process = segment.or_else(first).and_then(|s| join.process(s));
        let named = communicator.and_then(|c| c.members().values().find_map(|m| m.record.name.clone()));
        let scope = Scope {
            node: process.map_or_else(String::new, |p| p.record.host.clone()),
            job: process.and_then(|p| p.record.job.name.clone()).unwrap_or_default(),
            uid: uid_text(process.and_then(|p| p.record.owner)),
            communicator: named.or(comm.map(|c| c.to_string())).unwrap_or_default(),
            container: segment.filter(|_| is_rank).and_then(|s| Container::of_process(join, s)),
        };
        let id = self.id(scope);
        self.known.insert(asked, id);
        id
    }

    fn id(&mut self, scope: Scope) -> ScopeId {
        if let Some(id) = self.ids.get(&scope) {
            return *id;
        }
        let id = ScopeId(self.next);
        self.next += 1;
        self.ids.insert(scope.clone(), id);
        self.scopes.insert(id, scope);
        id
    }

    /// The labels of a scope that is in use.
    pub(super) fn get(&self, id: ScopeId) -> &Scope {
        const NONE: &Scope = &Scope {
            node: String::new(),
            job: String::new(),
            uid: String::new(),
            communicator: String::new(),
            container: None,
        };
        self.scopes.get(&id).unwrap_or(NONE)
    }

    /// Forgets what no series needs.
    pub(super) fn keep_only(&mut self, used: impl IntoIterator<Item = ScopeId>) {
        let used: HashSet<ScopeId> = used.into_iter().collect();
        self.known.clear();
        self.scopes.retain(|id, _| used.contains(id));
        self.ids.retain(|_, id| used.contains(id));
    }
}
