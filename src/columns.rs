//! Tables of rows with typed columns: Parquet files, and lines of CSV.

use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::column::reader::ColumnReader;
use parquet::column::writer::ColumnWriter;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, KeyValue};
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::statistics::Statistics;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

/// The compression level: higher ones take much longer and save little.
const LEVEL: i32 = 3;

/// The version of a file's columns, under a key of its metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    key: &'static str,
    version: &'static str,
}

impl Format {
    /// The tables of a recording.
    pub(crate) const RECORDING: Format = Format { key: "ringwatch.recording", version: "1" };
    /// The operations of a report.
    pub(crate) const OPERATIONS: Format = Format { key: "ringwatch.operations", version: "1" };
}

/// Rows that a file may have.
const ROWS_MAX: usize = 1 << 22;
/// Bytes that a file may have.
const FILE_MAX: u64 = 1 << 30;

/// The type of a column, as Parquet and its readers know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Type {
    /// A number that differs from row to row.
    Number,
    /// A number of which there are few.
    Word,
    /// Unix time in ns.
    Time,
    Text,
    Bytes,
}

/// A column's name and type.
pub(crate) type Head = (&'static str, Type);

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Values {
    Numbers(Vec<Option<i64>>),
    Texts(Vec<Option<ByteArray>>),
}

impl Values {
    fn of(kind: Type) -> Self {
        match kind {
            Type::Number | Type::Word | Type::Time => Values::Numbers(Vec::new()),
            Type::Text | Type::Bytes => Values::Texts(Vec::new()),
        }
    }

    fn len(&self) -> usize {
        match self {
            Values::Numbers(all) => all.len(),
            Values::Texts(all) => all.len(),
        }
    }
}

/// The columns of a table.
#[derive(Debug)]
pub(crate) struct Table {
    heads: &'static [Head],
    columns: Vec<Values>,
    /// Texts that came before: they are few.
    texts: HashMap<String, ByteArray>,
}

/// One cell.
#[derive(Debug)]
pub(crate) enum Cell<'a> {
    Number(Option<i64>),
    Text(Option<&'a str>),
    Bytes(Option<Vec<u8>>),
}

impl Table {
    pub(crate) fn new(heads: &'static [Head]) -> Self {
        let columns = heads.iter().map(|(_, kind)| Values::of(*kind)).collect();
        Table { heads, columns, texts: HashMap::new() }
    }

    /// Adds a row, whose cells have the types of the columns.
    pub(crate) fn push<const N: usize>(&mut self, cells: [Cell<'_>; N]) {
        debug_assert_eq!(N, self.heads.len(), "a cell for each column");
        for (column, cell) in self.columns.iter_mut().zip(cells) {
            match (column, cell) {
                (Values::Numbers(all), Cell::Number(n)) => all.push(n),
                (Values::Texts(all), Cell::Text(text)) => {
                    let known = |t: &str| match self.texts.get(t) {
                        Some(known) => known.clone(),
                        None => {
                            let new = ByteArray::from(t);
                            self.texts.insert(t.to_owned(), new.clone());
                            new
                        }
                    };
                    all.push(text.map(known));
                }
                (Values::Texts(all), Cell::Bytes(bytes)) => all.push(bytes.map(ByteArray::from)),
                (Values::Numbers(all), _) => all.push(None),
                (Values::Texts(all), Cell::Number(_)) => all.push(None),
            }
        }
    }

    /// Forgets the rows.
    pub(crate) fn clear(&mut self) {
        self.columns = self.heads.iter().map(|(_, kind)| Values::of(*kind)).collect();
    }

    pub(crate) fn rows(&self) -> usize {
        self.columns.first().map_or(0, Values::len)
    }

    /// Writes the table to a new file, and onto the disk.
    pub(crate) fn write(&self, name: &str, path: &Path) -> io::Result<()> {
        // A recording says what other users' jobs do.
        let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
        let synced = file.try_clone()?;
        let mut out = ParquetFile::new(file, Format::RECORDING, name, self.heads)?;
        out.write(self)?;
        out.close()?;
        synced.sync_all()
    }

    /// Writes the names of the columns as a line of CSV.
    pub(crate) fn write_csv_head(heads: &[Head], out: &mut impl Write) -> io::Result<()> {
        let mut lines = csv::Writer::from_writer(out);
        lines.write_record(heads.iter().map(|(name, _)| name))?;
        lines.flush()
    }

    /// Writes the rows as CSV. A value that is not known is empty, and times are Unix times in ns.
    pub(crate) fn write_csv(&self, out: &mut impl Write) -> io::Result<()> {
        let mut lines = csv::Writer::from_writer(out);
        for row in 0..self.rows() {
            for column in &self.columns {
                match column {
                    Values::Numbers(all) => {
                        lines.write_field(all[row].map_or_else(String::new, |n| n.to_string()))?;
                    }
                    Values::Texts(all) => {
                        lines.write_field(all[row].as_ref().map_or(&[][..], |t| t.data()))?
                    }
                }
            }
            lines.write_record(None::<&[u8]>)?;
        }
        lines.flush()
    }
}

/// A Parquet file that is written in groups of rows.
pub(crate) struct ParquetFile<W: Write + Send> {
    writer: SerializedFileWriter<W>,
}

impl<W: Write + Send> ParquetFile<W> {
    pub(crate) fn new(out: W, format: Format, name: &str, heads: &[Head]) -> io::Result<Self> {
        let schema = Arc::new(parse_message_type(&schema(name, heads)).map_err(io::Error::other)?);
        let level = ZstdLevel::try_new(LEVEL).map_err(io::Error::other)?;
        let version = KeyValue::new(format.key.to_owned(), format.version.to_owned());
        let mut properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(level))
            .set_key_value_metadata(Some(vec![version]));
        for (name, kind) in heads {
            if matches!(kind, Type::Number | Type::Time) {
                properties = properties
                    .set_column_dictionary_enabled((*name).into(), false)
                    .set_column_encoding((*name).into(), Encoding::DELTA_BINARY_PACKED);
            }
        }
        Ok(ParquetFile { writer: SerializedFileWriter::new(out, schema, Arc::new(properties.build()))? })
    }

    /// Writes the rows of a table, which has the columns of the file, as a group.
    pub(crate) fn write(&mut self, table: &Table) -> io::Result<()> {
        let mut group = self.writer.next_row_group()?;
        for values in &table.columns {
            let Some(mut column) = group.next_column()? else { break };
            match (column.untyped(), values) {
                (ColumnWriter::Int64ColumnWriter(w), Values::Numbers(all)) => {
                    let levels: Vec<i16> = all.iter().map(|v| i16::from(v.is_some())).collect();
                    let present: Vec<i64> = all.iter().filter_map(|v| *v).collect();
                    w.write_batch(&present, Some(&levels), None)?;
                }
                (ColumnWriter::ByteArrayColumnWriter(w), Values::Texts(all)) => {
                    let levels: Vec<i16> = all.iter().map(|v| i16::from(v.is_some())).collect();
                    let present: Vec<ByteArray> = all.iter().filter_map(Clone::clone).collect();
                    w.write_batch(&present, Some(&levels), None)?;
                }
                _ => return Err(io::Error::other("a column has another type than its values")),
            }
            column.close()?;
        }
        group.close()?;
        Ok(())
    }

    pub(crate) fn close(self) -> io::Result<()> {
        self.writer.close()?;
        Ok(())
    }
}

/// The columns in Parquet's language for schemas.
fn schema(name: &str, heads: &[Head]) -> String {
    let mut text = format!("message {name} {{\n");
    for (name, kind) in heads {
        let (kind, what) = match kind {
            Type::Number | Type::Word => ("int64", ""),
            Type::Time => ("int64", " (TIMESTAMP(NANOS,true))"),
            Type::Text => ("byte_array", " (STRING)"),
            Type::Bytes => ("byte_array", ""),
        };
        text.push_str(&format!("  optional {kind} {name}{what};\n"));
    }
    text.push('}');
    text
}

/// A table that was read.
#[derive(Debug)]
pub(crate) struct Rows {
    columns: HashMap<String, Values>,
    pub(crate) rows: usize,
}

impl Rows {
    /// Reads a file. Columns of other types than these are skipped: newer releases may have them.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let why = |e: io::Error| e.to_string();
        // A pipe would be waited for.
        let about = std::fs::metadata(path).map_err(why)?;
        if !about.is_file() || about.len() > FILE_MAX {
            return Err(format!("it is no file of at most {} MiB", FILE_MAX >> 20));
        }
        let file = File::open(path).map_err(why)?;
        // The library takes some damaged files for its own bugs.
        let read = std::panic::AssertUnwindSafe(|| Self::of(file));
        match std::panic::catch_unwind(read) {
            Ok(Ok(rows)) => Ok(rows),
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err("it is damaged".to_owned()),
        }
    }

    /// The least number of a column, by the file's own statistics; nothing else is read.
    pub(crate) fn least(path: &Path, column: &str) -> Option<i64> {
        let read = std::panic::AssertUnwindSafe(|| {
            if !std::fs::metadata(path).ok()?.is_file() {
                return None;
            }
            let reader = SerializedFileReader::new(File::open(path).ok()?).ok()?;
            let groups = reader.metadata().row_groups().iter();
            let columns = groups.flat_map(|g| g.columns()).filter(|c| c.column_descr().name() == column);
            let least = |c: &ColumnChunkMetaData| match c.statistics()? {
                Statistics::Int64(numbers) => numbers.min_opt().copied(),
                _ => None,
            };
            columns.filter_map(least).min()
        });
        // The library takes some damaged files for its own bugs.
        std::panic::catch_unwind(read).ok().flatten()
    }

    fn of(file: File) -> Result<Self, ParquetError> {
        let reader = SerializedFileReader::new(file)?;
        let about = reader.metadata().file_metadata();
        let version =
            about.key_value_metadata().into_iter().flatten().find(|k| k.key == Format::RECORDING.key);
        let version = version.and_then(|k| k.value.as_deref());
        let Format { key, version: readable } = Format::RECORDING;
        if version != Some(readable) {
            let what = version.unwrap_or("absent");
            return Err(ParquetError::General(format!("its {key} is {what}, and {readable} can be read")));
        }
        if usize::try_from(about.num_rows()).ok().is_none_or(|n| n > ROWS_MAX) {
            return Err(ParquetError::General(format!("it does not have from 0 to {ROWS_MAX} rows")));
        }
        let mut out = Rows { columns: HashMap::new(), rows: 0 };
        for group in 0..reader.num_row_groups() {
            let group = reader.get_row_group(group)?;
            let rows = usize::try_from(group.metadata().num_rows()).unwrap_or(usize::MAX);
            out.rows = out.rows.saturating_add(rows);
            if out.rows > ROWS_MAX {
                return Err(ParquetError::General(format!("it has more than {ROWS_MAX} rows")));
            }
            for at in 0..group.num_columns() {
                let about = group.metadata().column(at).column_descr_ptr();
                let name = about.name().to_owned();
                if about.max_rep_level() > 0 {
                    continue;
                }
                let is_optional = about.max_def_level() > 0;
                let values = match group.get_column_reader(at)? {
                    ColumnReader::Int64ColumnReader(mut r) => {
                        let (mut levels, mut values) = (Vec::new(), Vec::new());
                        r.read_records(rows, Some(&mut levels), None, &mut values)?;
                        Values::Numbers(spread(is_optional.then_some(&levels), values))
                    }
                    ColumnReader::ByteArrayColumnReader(mut r) => {
                        let (mut levels, mut values) = (Vec::new(), Vec::new());
                        r.read_records(rows, Some(&mut levels), None, &mut values)?;
                        Values::Texts(spread(is_optional.then_some(&levels), values))
                    }
                    _ => continue,
                };
                match (out.columns.get_mut(&name), values) {
                    (None, values) => drop(out.columns.insert(name, values)),
                    (Some(Values::Numbers(all)), Values::Numbers(more)) => all.extend(more),
                    (Some(Values::Texts(all)), Values::Texts(more)) => all.extend(more),
                    _ => {}
                }
            }
        }
        Ok(out)
    }

    /// A number; absent where the row or the column has none.
    pub(crate) fn number(&self, column: &str, row: usize) -> Option<i64> {
        match self.columns.get(column)? {
            Values::Numbers(all) => *all.get(row)?,
            Values::Texts(_) => None,
        }
    }

    pub(crate) fn bytes(&self, column: &str, row: usize) -> Option<&[u8]> {
        match self.columns.get(column)? {
            Values::Texts(all) => all.get(row)?.as_ref().map(ByteArray::data),
            Values::Numbers(_) => None,
        }
    }

    pub(crate) fn text(&self, column: &str, row: usize) -> Option<&str> {
        std::str::from_utf8(self.bytes(column, row)?).ok()
    }
}

/// The values of all rows. Levels say which rows have one; without them all have.
fn spread<T>(levels: Option<&Vec<i16>>, values: Vec<T>) -> Vec<Option<T>> {
    let Some(levels) = levels else { return values.into_iter().map(Some).collect() };
    let mut values = values.into_iter();
    levels.iter().map(|level| if *level > 0 { values.next() } else { None }).collect()
}
