//! Values of a foreign file, whatever its encoding.
//!
//! All values of a file are in one list and refer to each other by number. Such a document needs no recursion to build or to free, and
//! a value that is shared a million times takes its memory once.

/// Keys of one object that are looked at; real objects have about 20.
const KEYS_MAX: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    /// The bounds of its text.
    Text(u32, u32),
    /// The number of its list of items, or [`EMPTY`].
    List(u32),
    /// The number of its list of keys and values by turns, or [`EMPTY`].
    Object(u32),
}

/// Lists without an item are not kept: a byte of a file makes one.
const EMPTY: u32 = u32::MAX;

/// The number of a value.
pub(super) type Id = u32;

/// The file has more values, or more text, than a reader may keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooLarge;

/// Values and the texts in them.
#[derive(Debug, Default)]
pub(super) struct Document {
    nodes: Vec<Node>,
    lists: Vec<Vec<Id>>,
    texts: String,
    root: Id,
}

impl Document {
    /// Values that a document may have. A dump of 20,000 calls has about a million.
    pub(super) const NODES_MAX: usize = 1 << 23;

    pub(super) fn add(&mut self, node: Node) -> Result<Id, TooLarge> {
        if self.nodes.len() >= Self::NODES_MAX {
            return Err(TooLarge);
        }
        self.nodes.push(node);
        Id::try_from(self.nodes.len() - 1).map_err(|_| TooLarge)
    }

    pub(super) fn add_text(&mut self, text: &str) -> Result<Id, TooLarge> {
        let from = u32::try_from(self.texts.len()).map_err(|_| TooLarge)?;
        let to = u32::try_from(self.texts.len() + text.len()).map_err(|_| TooLarge)?;
        self.texts.push_str(text);
        self.add(Node::Text(from, to))
    }

    pub(super) fn add_list(&mut self, items: Vec<Id>) -> Result<Id, TooLarge> {
        let list = self.keep(items)?;
        self.add(Node::List(list))
    }

    pub(super) fn add_object(&mut self, items: Vec<Id>) -> Result<Id, TooLarge> {
        let list = self.keep(items)?;
        self.add(Node::Object(list))
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    fn keep(&mut self, items: Vec<Id>) -> Result<u32, TooLarge> {
        if items.is_empty() {
            return Ok(EMPTY);
        }
        self.lists.push(items);
        u32::try_from(self.lists.len() - 1).ok().filter(|at| *at != EMPTY).ok_or(TooLarge)
    }

    /// The items of a list, to be appended to; absent where the value is none.
    pub(super) fn list_mut(&mut self, id: Id) -> Option<&mut Vec<Id>> {
        match self.nodes.get_mut(id as usize) {
            Some(Node::List(at)) => first_of(&mut self.lists, at),
            _ => None,
        }
    }

    /// The keys and values of an object, to be appended to; absent where the value is none.
    pub(super) fn object_mut(&mut self, id: Id) -> Option<&mut Vec<Id>> {
        match self.nodes.get_mut(id as usize) {
            Some(Node::Object(at)) => first_of(&mut self.lists, at),
            _ => None,
        }
    }

    pub(super) fn set_root(&mut self, root: Id) {
        self.root = root;
    }

    pub(super) fn root(&self) -> Value<'_> {
        Value { document: self, id: self.root }
    }
}

/// The list with this number, which an empty one gets now.
fn first_of<'a>(lists: &'a mut Vec<Vec<Id>>, at: &mut u32) -> Option<&'a mut Vec<Id>> {
    if *at == EMPTY {
        lists.push(Vec::new());
        *at = u32::try_from(lists.len() - 1).ok()?;
    }
    lists.get_mut(*at as usize)
}

/// One value of a document.
#[derive(Debug, Clone, Copy)]
pub(super) struct Value<'a> {
    document: &'a Document,
    id: Id,
}

impl<'a> Value<'a> {
    fn node(self) -> Node {
        self.document.nodes.get(self.id as usize).copied().unwrap_or(Node::None)
    }

    fn ids(self) -> &'a [Id] {
        let at = match self.node() {
            Node::List(at) | Node::Object(at) => at,
            _ => return &[],
        };
        self.document.lists.get(at as usize).map_or(&[], Vec::as_slice)
    }

    pub(super) fn is_object(self) -> bool {
        matches!(self.node(), Node::Object(_))
    }

    /// The items of a list; none where the value is no list.
    pub(super) fn items(self) -> impl ExactSizeIterator<Item = Value<'a>> {
        let ids = if matches!(self.node(), Node::List(_)) { self.ids() } else { &[] };
        ids.iter().map(move |id| Value { document: self.document, id: *id })
    }

    /// The keys and values of an object; none where the value is no object.
    pub(super) fn pairs(self) -> impl Iterator<Item = (Value<'a>, Value<'a>)> {
        let ids = if self.is_object() { self.ids() } else { &[] };
        let at = move |id: Id| Value { document: self.document, id };
        ids.chunks_exact(2).map(move |pair| (at(pair[0]), at(pair[1])))
    }

    /// The value of a key among the first keys of an object. None counts as absent.
    pub(super) fn get(self, key: &str) -> Option<Value<'a>> {
        let mut pairs = self.pairs().take(KEYS_MAX);
        pairs.find(|(k, _)| k.text() == Some(key)).map(|(_, v)| v).filter(|v| v.node() != Node::None)
    }

    pub(super) fn text(self) -> Option<&'a str> {
        match self.node() {
            Node::Text(from, to) => self.document.texts.get(from as usize..to as usize),
            _ => None,
        }
    }

    pub(super) fn integer(self) -> Option<i64> {
        if let Node::Int(n) = self.node() { Some(n) } else { None }
    }

    pub(super) fn unsigned(self) -> Option<u64> {
        self.integer().and_then(|n| u64::try_from(n).ok())
    }

    pub(super) fn boolean(self) -> Option<bool> {
        if let Node::Bool(b) = self.node() { Some(b) } else { None }
    }

    /// A number, whether it was written as an integer or not.
    pub(super) fn number(self) -> Option<f64> {
        match self.node() {
            Node::Int(n) => Some(n as f64),
            Node::Float(f) => Some(f),
            _ => None,
        }
    }
}
