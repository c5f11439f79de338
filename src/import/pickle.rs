//! Python's pickle format, as far as it holds data.
//!
//! A pickle is a program for a stack machine, and some of its instructions import and call Python code. This reader knows the
//! instructions that make data, refuses all others, and never runs anything. The format is that of Python's `pickletools`.

use super::document::{Document, Id, Node, TooLarge};
use super::fault::Fault;
use std::collections::HashMap;

/// Every pickle of protocol 2 or later begins with this byte.
pub(super) const MAGIC: u8 = 0x80;
/// The newest protocol whose instructions are known.
const PROTOCOL_MAX: u8 = 5;

/// Marks that are set at once: one for each list or dict that is being filled.
const MARKS_MAX: usize = 1 << 12;
/// Times that a value is put on the stack.
const PUSHES_MAX: usize = 1 << 25;

/// Reads one pickle.
pub(super) fn read(bytes: &[u8]) -> Result<Document, Fault> {
    let mut machine = Machine { bytes, at: 0, document: Document::default(), ..Machine::default() };
    let root = loop {
        let opcode_at = machine.at;
        match machine.step() {
            Ok(None) => {}
            Ok(Some(root)) => break root,
            Err(why) => return Err(Fault::at_byte(opcode_at, why)),
        }
    };
    machine.document.set_root(root);
    Ok(machine.document)
}

#[derive(Default)]
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    document: Document,
    stack: Vec<Id>,
    /// Heights of the stack at which marks were set.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
    pushes: usize,
}

const CUT: &str = "the file ends within this instruction";
const EMPTY: &str = "it takes more from the stack than is there";
const NO_MARK: &str = "it needs a mark, and none is set";

impl From<TooLarge> for String {
    fn from(TooLarge: TooLarge) -> Self {
        format!("it has more than the {} values that are read", Document::NODES_MAX)
    }
}

impl<'a> Machine<'a> {
    /// Runs one instruction. Returns the result after the last one.
    fn step(&mut self) -> Result<Option<Id>, String> {
        let opcode = self.byte()?;
        match opcode {
            // PROTO
            0x80 => match self.byte()? {
                0..=PROTOCOL_MAX => {}
                n => {
                    return Err(format!(
                        "protocol {n} is newer than {PROTOCOL_MAX}, the newest that is known"
                    ));
                }
            },
            // FRAME: its length, which nothing here needs.
            0x95 => drop(self.take(8)?),
            // STOP
            b'.' => return self.pop().map(Some),
            b'N' => self.push(Node::None)?,
            0x88 => self.push(Node::Bool(true))?,
            0x89 => self.push(Node::Bool(false))?,
            b'K' | b'M' | b'J' | 0x8a | b'G' => self.number(opcode)?,
            b'X' | 0x8c | 0x8d => self.text(opcode)?,
            b'(' if self.marks.len() >= MARKS_MAX => return Err("it sets too many marks".to_owned()),
            b'(' => self.marks.push(self.stack.len()),
            b']' | b')' => {
                let id = self.document.add_list(Vec::new())?;
                self.put(id)?;
            }
            b'}' => {
                let id = self.document.add_object(Vec::new())?;
                self.put(id)?;
            }
            // TUPLE1 to TUPLE3, and TUPLE: a tuple is a list here.
            0x85..=0x87 => self.tuple(usize::from(opcode - 0x84))?,
            b't' => {
                let items = self.since_mark()?;
                let id = self.document.add_list(items)?;
                self.put(id)?;
            }
            b'a' => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            b'e' => {
                let items = self.since_mark()?;
                self.append(&items)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(&[key, value])?;
            }
            b'u' => {
                let items = self.since_mark()?;
                self.set(&items)?;
            }
            b'q' | b'r' | 0x94 | b'h' | b'j' => self.memorize(opcode)?,
            _ => return Err(refused(opcode)),
        }
        Ok(None)
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let taken = self.at.checked_add(n).and_then(|to| self.bytes.get(self.at..to)).ok_or(CUT)?;
        self.at += n;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, String> {
        Ok(self.take(1)?[0])
    }

    fn u32(&mut self) -> Result<u32, String> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn put(&mut self, id: Id) -> Result<(), String> {
        self.pushes += 1;
        if self.pushes > PUSHES_MAX {
            return Err("it uses its values too often".to_owned());
        }
        self.stack.push(id);
        Ok(())
    }

    fn push(&mut self, node: Node) -> Result<(), String> {
        let id = self.document.add(node)?;
        self.put(id)?;
        Ok(())
    }

    fn pop(&mut self) -> Result<Id, String> {
        // What lies below a mark is not reached before the mark is.
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err(EMPTY.to_owned());
        }
        self.stack.pop().ok_or_else(|| EMPTY.to_owned())
    }

    fn since_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().ok_or(NO_MARK)?;
        Ok(self.stack.split_off(mark))
    }

    fn number(&mut self, opcode: u8) -> Result<(), String> {
        let node = match opcode {
            b'K' => Node::Int(i64::from(self.byte()?)),
            b'M' => {
                let bytes = self.take(2)?;
                Node::Int(i64::from(u16::from_le_bytes([bytes[0], bytes[1]])))
            }
            b'J' => Node::Int(i64::from(self.u32()?.cast_signed())),
            b'G' => {
                let bytes: [u8; 8] = self.take(8)?.try_into().map_err(|_| CUT)?;
                Node::Float(f64::from_be_bytes(bytes))
            }
            // LONG1: little-endian two's complement.
            _ => {
                let length = usize::from(self.byte()?);
                let bytes = self.take(length)?;
                if length > 8 {
                    return Err("an integer has more than 64 bits".to_owned());
                }
                let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
                let mut whole = [if negative { 0xff } else { 0 }; 8];
                whole[..length].copy_from_slice(bytes);
                Node::Int(i64::from_le_bytes(whole))
            }
        };
        self.push(node)
    }

    fn text(&mut self, opcode: u8) -> Result<(), String> {
        let length = match opcode {
            b'X' => self.u32()? as usize,
            0x8c => usize::from(self.byte()?),
            _ => {
                let bytes: [u8; 8] = self.take(8)?.try_into().map_err(|_| CUT)?;
                usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| CUT)?
            }
        };
        let bytes = self.take(length)?;
        let text = std::str::from_utf8(bytes).map_err(|_| "a text is not UTF-8")?;
        let id = self.document.add_text(text)?;
        self.put(id)?;
        Ok(())
    }

    fn tuple(&mut self, n: usize) -> Result<(), String> {
        let mut items = Vec::with_capacity(n);
        for _ in 0..n {
            items.push(self.pop()?);
        }
        items.reverse();
        let id = self.document.add_list(items)?;
        self.put(id)?;
        Ok(())
    }

    fn append(&mut self, items: &[Id]) -> Result<(), String> {
        let list = *self.stack.last().ok_or(EMPTY)?;
        let list = self.document.list_mut(list).ok_or("it appends to what is no list")?;
        list.extend_from_slice(items);
        Ok(())
    }

    fn set(&mut self, items: &[Id]) -> Result<(), String> {
        let object = *self.stack.last().ok_or(EMPTY)?;
        let object = self.document.object_mut(object).ok_or("it sets keys of what is no dict")?;
        if !items.len().is_multiple_of(2) {
            return Err("a key has no value".to_owned());
        }
        object.extend_from_slice(items);
        Ok(())
    }

    fn memorize(&mut self, opcode: u8) -> Result<(), String> {
        let index = match opcode {
            b'q' | b'h' => u32::from(self.byte()?),
            b'r' | b'j' => self.u32()?,
            // MEMOIZE: the next free one.
            _ => u32::try_from(self.memo.len()).map_err(|_| "the memo is full")?,
        };
        if matches!(opcode, b'h' | b'j') {
            let id = self.memo.get(&index).copied();
            let id = id.ok_or_else(|| format!("nothing is at {index} of the memo"))?;
            self.put(id)?;
        } else {
            let top = *self.stack.last().ok_or(EMPTY)?;
            // A value is memorized once.
            if self.memo.len() > self.document.len() {
                return Err("it memorizes more values than it has".to_owned());
            }
            self.memo.insert(index, top);
        }
        Ok(())
    }
}

/// Why an instruction is not executed.
fn refused(opcode: u8) -> String {
    let name = match opcode {
        b'c' => "GLOBAL",
        0x93 => "STACK_GLOBAL",
        b'R' => "REDUCE",
        b'b' => "BUILD",
        b'i' => "INST",
        b'o' => "OBJ",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        b'P' | b'Q' => "PERSID",
        0x82..=0x84 => "EXT",
        _ => return format!("instruction 0x{opcode:02x} makes no plain data and is not read"),
    };
    format!("instruction {name} imports or runs code; it is not executed, and a dump has none")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(bytes: &[u8]) -> String {
        read(bytes).map(|_| ()).expect_err("a fault").to_string()
    }

    #[test]
    fn data_of_all_protocols_are_read() {
        // pickle.dumps({"a": [1, -2, 300, 70000, 2**40, 1.5, None, True], "b": ("x", "x")}, protocol=2 and 4)
        let two: &[u8] = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffM,\x01Jp\x11\x01\x00\x8a\x06\x00\x00\x00\x00\x00\x01G?\xf8\x00\x00\x00\x00\x00\x00N\x88eX\x01\x00\x00\x00bq\x03X\x01\x00\x00\x00xq\x04h\x04\x86q\x05u.";
        let four: &[u8] = b"\x80\x04\x959\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffM,\x01Jp\x11\x01\x00\x8a\x06\x00\x00\x00\x00\x00\x01G?\xf8\x00\x00\x00\x00\x00\x00N\x88e\x8c\x01b\x94\x8c\x01x\x94h\x04\x86\x94u.";
        for bytes in [two, four] {
            let document = read(bytes).expect("data");
            let a: Vec<_> = document.root().get("a").expect("a").items().collect();
            let integers: Vec<_> = a[..5].iter().map(|v| v.integer()).collect();
            assert_eq!(integers, [1, -2, 300, 70_000, 1 << 40].map(Some));
            assert_eq!((a[5].number(), a[7].boolean()), (Some(1.5), Some(true)));
            let b: Vec<_> = document.root().get("b").expect("b").items().map(|v| v.text()).collect();
            assert_eq!(b, [Some("x"), Some("x")]);
        }
    }

    #[test]
    fn code_is_refused_with_its_position() {
        // os.system("id")
        let system = b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.";
        assert_eq!(
            fault(system),
            "byte 2: instruction GLOBAL imports or runs code; it is not executed, and a dump has none"
        );
        for (opcode, name) in [(0x93, "STACK_GLOBAL"), (b'R', "REDUCE"), (0x81, "NEWOBJ"), (b'b', "BUILD")] {
            assert!(fault(&[0x80, 2, opcode]).contains(name));
        }
    }

    #[test]
    fn hostile_pickles_take_little_time_and_memory() {
        // A million lists, each in the one before it.
        let mut deep = vec![0x80, 2];
        deep.extend(std::iter::repeat_n(b"]".as_slice(), 1_000_000).flatten());
        deep.extend(std::iter::repeat_n(b'a', 999_999));
        deep.push(b'.');
        drop(read(&deep).expect("nested lists"));
        // Sixty lists, each twice in the next: 2^60 values, were they copied.
        let mut bomb = vec![0x80, 2, b'N', b'q', 0];
        for i in 0..60_u8 {
            bomb.extend([b']', b'h', i, b'a', b'h', i, b'a', b'q', i + 1, b'0']);
        }
        assert!(fault(&bomb).starts_with("byte 14: instruction 0x30"), "{}", fault(&bomb));
        let mut bomb = vec![0x80, 2, b'N', b'q', 0];
        for i in 0..60_u8 {
            bomb.extend([b']', b'h', i, b'a', b'h', i, b'a', b'q', i + 1]);
        }
        bomb.push(b'.');
        assert_eq!(read(&bomb).expect("a shared list").root().items().len(), 2);
        // Marks, and a memo of one value.
        assert!(fault(&[vec![0x80, 2], vec![b'('; 100_000]].concat()).contains("too many marks"));
        assert!(
            fault(&[vec![0x80, 2, b'N'], vec![0x94; 100_000]].concat()).contains("memorizes more values")
        );
        // A text and a tuple that claim a gigabyte.
        assert_eq!(fault(b"\x80\x02X\x00\x00\x00\x40a."), "byte 2: the file ends within this instruction");
        assert_eq!(fault(b"\x80\x02t."), "byte 2: it needs a mark, and none is set");
        assert_eq!(fault(b"\x80\x02(K\x01(.").split(": ").next(), Some("byte 6"));
        for cut in 0..system_len() {
            assert!(read(&sample()[..cut]).is_err());
        }
    }

    fn sample() -> &'static [u8] {
        b"\x80\x02}q\x00X\x07\x00\x00\x00entriesq\x01]q\x02s."
    }

    fn system_len() -> usize {
        sample().len()
    }
}
