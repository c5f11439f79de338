//! `ringwatch mcp`: what `report`, `diagnose` and `top` show, for an assistant that speaks the Model Context Protocol.
//!
//! Every tool looks anew and only reads. Texts come from jobs and are data: nothing in them is done.

use super::{block_on, report};
use crate::cli::{Mcp, Reported};
use crate::explain::Texts;
use crate::model::{Finding, Snapshot};
use crate::report::Pages;
use anyhow::{Context, bail};
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorData, Implementation,
    JsonObject, ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
    ToolAnnotations,
};
use rmcp::service::RequestContext;
use rmcp::{RoleServer, ServerHandler, ServiceExt};
use serde_json::{Value, json};
use std::sync::Arc;

/// Findings, and operations in flight, that an answer has at most: assistants read them whole.
const FINDINGS_MAX: usize = 50;
const IN_FLIGHT_MAX: usize = 50;
/// Bytes of a text to be explained.
const TEXT_MAX: usize = 1 << 20;

const INSTRUCTIONS: &str = "Ringwatch watches NCCL jobs: which rank, which operation, and why a job is slow or stands still. \
    Ask for findings first. Ranks are those of the communicator that a finding names; the evidence says which ranks of the job \
    they are. A value of null is not known. Nothing can be changed here.";

pub(super) fn run(o: &Mcp) -> anyhow::Result<u8> {
    let server = Server { on: o.on.clone() };
    block_on(async {
        let running = server.serve(rmcp::transport::stdio()).await.context(
            "an assistant's program starts this verb and speaks MCP on its standard input; none does",
        )?;
        running.waiting().await?;
        Ok(0)
    })
}

/// Answers about some jobs.
#[derive(Debug, Clone)]
struct Server {
    on: Reported,
}

/// The tools: name, description, and the properties of their arguments.
fn tools() -> Vec<Tool> {
    let text = |description: &str| json!({"type": "string", "description": description});
    let flag = |description: &str| json!({"type": "boolean", "description": description});
    let all = [
        (
            "findings",
            "What is wrong, or was: the culprit ranks, the operation, the evidence, what it costs, and what to do next. Open ones first.",
            json!({
                "kind": text("Only findings of this kind, for example missing-rank or straggler"),
                "open": flag("Only those that are open"),
            }),
        ),
        (
            "report",
            "Each job on one page: ranks, operations by size with their times and bandwidth, training steps, late ranks, findings, and what was lost.",
            json!({"json": flag("As JSON, with every communicator; otherwise as text")}),
        ),
        (
            "in_flight",
            "Operations that have not ended, the oldest first, and how far each rank is in them.",
            json!({}),
        ),
        (
            "explain",
            "What errors of NCCL, PyTorch and the driver in a text mean, and what to do about them.",
            json!({"text": text("The error, or a part of a log")}),
        ),
    ];
    let tool = |(name, description, properties): (&'static str, &'static str, Value)| {
        let required: Vec<&str> = properties.get("text").map(|_| "text").into_iter().collect();
        let schema = json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false});
        let schema: JsonObject = schema.as_object().cloned().unwrap_or_default();
        let annotations = ToolAnnotations::new().read_only(true).open_world(false);
        Tool::new(name, description, Arc::new(schema)).with_annotations(annotations)
    };
    all.into_iter().map(tool).collect()
}

/// The answer of a tool.
enum Answer {
    Json(Value),
    Text(String),
}

impl Server {
    fn answer(&self, tool: &str, arguments: &JsonObject) -> anyhow::Result<Answer> {
        let is_set = |name: &str| match arguments.get(name) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => bail!("{name} is true or false, and not {other}"),
        };
        let text = |name: &str| match arguments.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.as_str())),
            Some(other) => bail!("{name} is a text, and not {other}"),
        };
        match tool {
            "findings" => {
                let (kind, only_open) = (text("kind")?, is_set("open")?);
                findings(&report::snapshot(&self.on)?, kind, only_open)
            }
            "report" => {
                let as_json = is_set("json")?;
                let pages = Pages::of(&report::snapshot(&self.on)?);
                if as_json {
                    return Ok(Answer::Json(serde_json::to_value(&pages)?));
                }
                let mut page = Vec::new();
                pages.text(&mut page)?;
                Ok(Answer::Text(String::from_utf8_lossy(&page).into_owned()))
            }
            "in_flight" => {
                let s = report::snapshot(&self.on)?;
                let shown: Vec<_> = s.in_flight.iter().take(IN_FLIGHT_MAX).collect();
                let more = s.in_flight.len() - shown.len();
                Ok(Answer::Json(json!({"source": s.source, "at": s.wall, "in_flight": shown, "more": more})))
            }
            "explain" => {
                let text = text("text")?.filter(|t| t.len() <= TEXT_MAX);
                let text = text.with_context(|| format!("text is needed, of at most {TEXT_MAX} bytes"))?;
                Ok(Answer::Json(json!({"explained": Texts::built_in()?.explain(text.as_bytes())?})))
            }
            _ => bail!("there is no tool {tool}"),
        }
    }
}

fn findings(s: &Snapshot, kind: Option<&str>, only_open: bool) -> anyhow::Result<Answer> {
    let is_asked = |f: &&Finding| kind.is_none_or(|k| f.kind.as_str() == k) && (f.open || !only_open);
    let all: Vec<&Finding> = s.findings.iter().filter(is_asked).collect();
    let shown = &all[..all.len().min(FINDINGS_MAX)];
    let more = (all.len() - shown.len()) as u64 + s.more_findings;
    // Whoever asks an empty place has to know that it is empty.
    let processes = s.segments.len();
    let unread: Vec<String> = s.unread.iter().map(ToString::to_string).collect();
    Ok(Answer::Json(json!({
        "source": s.source, "at": s.wall, "processes": processes, "findings": shown, "more": more, "unread": unread,
    })))
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("ringwatch", env!("CARGO_PKG_VERSION")))
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let (server, arguments) = (self.clone(), request.arguments.unwrap_or_default());
        // Reading segments takes a while, and other requests come meanwhile.
        let answer = tokio::task::spawn_blocking(move || server.answer(&request.name, &arguments)).await;
        let result = match answer {
            Ok(Ok(Answer::Json(value))) => CallToolResult::structured(value),
            Ok(Ok(Answer::Text(text))) => CallToolResult::success(vec![ContentBlock::text(text)]),
            Ok(Err(e)) => CallToolResult::error(vec![ContentBlock::text(format!("{e:#}"))]),
            Err(_) => CallToolResult::error(vec![ContentBlock::text("a bug in ringwatch")]),
        };
        Ok(result.into())
    }
}
