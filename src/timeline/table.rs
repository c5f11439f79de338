//! Finished operations as a table, one row for each rank's part.

use super::ended_ns;
use crate::columns::{Cell, Format, Head, ParquetFile, Table, Type};
use crate::join::{Finished, FinishedPart, FinishedSink, Join};
use crate::model::Track;
use std::fmt;
use std::io::{self, Write};

/// Rows that are kept before they are written.
const GROUP: usize = 1 << 17;

/// The columns. They are documented in src/report/README.md.
const HEADS: &[Head] = &[
    ("job", Type::Text),
    ("host", Type::Text),
    ("pid", Type::Word),
    ("job_rank", Type::Word),
    ("communicator", Type::Text),
    ("communicator_name", Type::Text),
    ("rank", Type::Word),
    ("track", Type::Text),
    ("issue_order", Type::Number),
    ("operation", Type::Text),
    ("bytes", Type::Word),
    ("data_type", Type::Text),
    ("algorithm", Type::Text),
    ("protocol", Type::Text),
    ("called", Type::Time),
    ("issued", Type::Time),
    ("started", Type::Time),
    ("ended", Type::Time),
    ("duration_ns", Type::Number),
    ("waited_ns", Type::Number),
    ("late_ns", Type::Number),
    ("transfer_ns", Type::Number),
    ("bus_bytes_per_s", Type::Number),
    ("is_finished", Type::Word),
];

/// How a table is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableFormat {
    /// Lines with commas.
    Csv,
    /// A Parquet file.
    Parquet,
}

/// Where the rows go.
enum Output<W: Write + Send> {
    Csv(W),
    Parquet(ParquetFile<W>),
}

/// See the module.
pub struct OperationTable<W: Write + Send> {
    table: Table,
    output: Option<Output<W>>,
    fault: Option<io::Error>,
    rows: u64,
}

impl<W: Write + Send> fmt::Debug for OperationTable<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationTable").field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl<W: Write + Send> OperationTable<W> {
    /// Begins a table.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn new(mut out: W, format: TableFormat) -> io::Result<Self> {
        let output = match format {
            TableFormat::Csv => {
                Table::write_csv_head(HEADS, &mut out)?;
                Output::Csv(out)
            }
            TableFormat::Parquet => {
                Output::Parquet(ParquetFile::new(out, Format::OPERATIONS, "operations", HEADS)?)
            }
        };
        Ok(OperationTable { table: Table::new(HEADS), output: Some(output), fault: None, rows: 0 })
    }

    /// Writes what is left. Returns the number of rows.
    ///
    /// # Errors
    /// Those of the writer, now or before.
    pub fn finish(&mut self) -> io::Result<u64> {
        self.flush();
        if let Some(fault) = self.fault.take() {
            return Err(fault);
        }
        match self.output.take() {
            Some(Output::Parquet(file)) => file.close()?,
            Some(Output::Csv(mut out)) => out.flush()?,
            None => {}
        }
        Ok(self.rows)
    }

    fn flush(&mut self) {
        let written = match &mut self.output {
            Some(Output::Csv(out)) => self.table.write_csv(out),
            Some(Output::Parquet(file)) if self.table.rows() > 0 => file.write(&self.table),
            _ => Ok(()),
        };
        self.table.clear();
        if let Err(fault) = written {
            self.fault.get_or_insert(fault);
            self.output = None;
        }
    }

    fn push(&mut self, op: &Finished, part: &FinishedPart, join: &Join) {
        let process = join.process(part.segment).map(|p| &p.record);
        let time = |at_ns: Option<u64>| {
            Cell::Number(at_ns.and_then(|at_ns| join.unix_ns(at_ns)).and_then(|ns| i64::try_from(ns).ok()))
        };
        let number = |n: Option<u64>| Cell::Number(n.and_then(|n| i64::try_from(n).ok()));
        let small = |n: Option<u32>| Cell::Number(n.map(i64::from));
        let late_ns = op.late.filter(|late| late.rank == part.rank).map(|late| late.by_ns);
        let communicator = op.comm.to_string();
        let name = join.communicator(op.comm).and_then(|c| c.name());
        let track = match op.track {
            Track::Collective => "collective".to_owned(),
            Track::Replay => "replay".to_owned(),
            Track::Pair(from, to) => format!("{from}->{to}"),
        };
        self.table.push([
            Cell::Text(process.and_then(|p| p.job.name.as_deref())),
            Cell::Text(process.map(|p| &*p.host)),
            small(process.map(|p| p.pid)),
            small(process.and_then(|p| p.job.rank)),
            Cell::Text(Some(&communicator)),
            Cell::Text(name.as_deref()),
            small(Some(part.rank.0)),
            Cell::Text(Some(&track)),
            number(Some(op.operation.order)),
            Cell::Text(Some(op.func.as_str())),
            number(op.operation.bytes),
            Cell::Text(op.operation.dtype.map(|d| d.as_str())),
            Cell::Text(op.operation.algo.map(|a| a.as_str())),
            Cell::Text(op.operation.proto.map(|p| p.as_str())),
            time(part.called_ns),
            time(part.issued_ns),
            time(part.started_ns),
            time(ended_ns(part)),
            number(part.duration_ns),
            number(part.waiting_ns),
            number(late_ns),
            number(op.transfer_ns),
            number(op.busbw.map(|b| b as u64)),
            Cell::Number(Some(i64::from(part.ended))),
        ]);
        self.rows += 1;
        if self.table.rows() >= GROUP {
            self.flush();
        }
    }
}

impl<W: Write + Send> FinishedSink for OperationTable<W> {
    fn end(&mut self, open: &[Finished], join: &Join, now_ns: u64) {
        self.take(open, join, now_ns);
    }

    fn take(&mut self, operations: &[Finished], join: &Join, _: u64) {
        if self.output.is_none() {
            return;
        }
        for op in operations {
            for part in &op.parts {
                self.push(op, part, join);
            }
        }
    }
}
