//! The GPUs that were given to containers: the kubelet's PodResourcesLister, v1, over its socket.
//!
//! It is asked on a thread of its own, which ends with the answer or its time: a kubelet that hangs keeps no other sampler
//! waiting.

use super::{Absent, Batch, Sampler};
use crate::model::{Fact, Holder, PodsFact, steers};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;

/// Between two questions, in ns.
const EVERY_NS: u64 = 10_000_000_000;
/// How long the kubelet may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// How often an answer is looked for.
const LOOK: Duration = Duration::from_secs(1);
/// The largest answer, in bytes. A node has some hundred pods.
const ANSWER: usize = 16 << 20;
/// Holders that are told, and the longest name: Kubernetes allows 253 characters.
const HOLDERS: usize = 4_096;
const NAME: usize = 253;
/// Resources that are no GPUs are left out; drivers of other makes end in `/gpu` as well.
const GPU: &str = "gpu";
const MIG: &str = "/mig-";

/// The messages, as far as they are read; numbers are those of k8s.io/kubelet/pkg/apis/podresources/v1.
mod message {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ListRequest {}

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ListResponse {
        #[prost(message, repeated, tag = "1")]
        pub(super) pod_resources: Vec<Pod>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Pod {
        #[prost(string, tag = "1")]
        pub(super) name: String,
        #[prost(string, tag = "2")]
        pub(super) namespace: String,
        #[prost(message, repeated, tag = "3")]
        pub(super) containers: Vec<Container>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Container {
        #[prost(string, tag = "1")]
        pub(super) name: String,
        #[prost(message, repeated, tag = "2")]
        pub(super) devices: Vec<Devices>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Devices {
        #[prost(string, tag = "1")]
        pub(super) resource_name: String,
        #[prost(string, repeated, tag = "2")]
        pub(super) device_ids: Vec<String>,
    }
}

/// The answer to a question, or the reason why there is none.
type Answer = Result<PodsFact, String>;

/// The sampler.
#[derive(Debug)]
pub struct Pods {
    socket: PathBuf,
    asked_ns: Option<u64>,
    answer: Option<Receiver<Answer>>,
}

impl Pods {
    /// Asks the kubelet behind this socket.
    pub fn new(socket: PathBuf) -> Self {
        Pods { socket, asked_ns: None, answer: None }
    }
}

impl Sampler for Pods {
    fn name(&self) -> &'static str {
        "pods"
    }

    fn period(&self) -> Duration {
        LOOK
    }

    fn is_optional(&self) -> bool {
        true
    }

    fn sample(&mut self, now_ns: u64, batch: &mut Batch) -> Result<(), Absent> {
        if let Some(waiting) = &self.answer {
            let answer = match waiting.try_recv() {
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => Err("the thread that asks ended".to_owned()),
                Ok(answer) => answer,
            };
            self.answer = None;
            match answer {
                Ok(fact) => batch.tell(now_ns, Fact::Pods(fact)),
                Err(why) => {
                    batch.failed();
                    return Err(Absent(format!("{}: {why}", self.socket.display())));
                }
            }
        }
        if self.asked_ns.is_some_and(|t| now_ns.saturating_sub(t) < EVERY_NS) {
            return Ok(());
        }
        if !self.socket.exists() {
            return Err(Absent(format!("there is no {}", self.socket.display())));
        }
        self.asked_ns = Some(now_ns);
        let (send, receive) = sync_channel(1);
        let socket = self.socket.clone();
        let asked = std::thread::Builder::new().name("kubelet".to_owned()).spawn(move || {
            // Who asked may be gone.
            send.send(ask(&socket)).ok();
        });
        asked.map_err(|e| Absent(format!("no thread to ask the kubelet: {e}")))?;
        self.answer = Some(receive);
        Ok(())
    }
}

fn ask(socket: &Path) -> Answer {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    let late = || format!("no answer within {} s", PATIENCE.as_secs());
    let answer = runtime.block_on(async { tokio::time::timeout(PATIENCE, list(socket)).await });
    Ok(fact(answer.map_err(|_| late())??))
}

async fn list(socket: &Path) -> Result<message::ListResponse, String> {
    let at = socket.to_str().ok_or("its path is no text")?;
    let endpoint = Endpoint::from_shared(format!("unix://{at}")).map_err(|e| e.to_string())?;
    let channel = endpoint.connect().await.map_err(|e| words(&e))?;
    let mut client = tonic::client::Grpc::new(channel).max_decoding_message_size(ANSWER);
    client.ready().await.map_err(|e| words(&e))?;
    let codec = tonic_prost::ProstCodec::<message::ListRequest, message::ListResponse>::default();
    let path = PathAndQuery::from_static("/v1.PodResourcesLister/List");
    let said = client.unary(tonic::Request::new(message::ListRequest {}), path, codec).await;
    said.map(tonic::Response::into_inner).map_err(|s| format!("{}: {}", s.code(), s.message()))
}

/// An error with what lies below it: "transport error" alone helps nobody.
fn words(e: &dyn std::error::Error) -> String {
    e.source().map_or_else(|| e.to_string(), |below| format!("{e}: {}", words(below)))
}

/// Decodes an answer as it travels.
pub(in crate::ingest) fn decode(answer: &[u8]) -> Result<PodsFact, prost::DecodeError> {
    prost::Message::decode(answer).map(fact)
}

fn fact(said: message::ListResponse) -> PodsFact {
    // Names become labels and go to screens. One that is in many places is copied to each, so it is looked at before.
    let plain = |s: &String| !s.is_empty() && s.len() <= NAME && !s.chars().any(steers);
    let containers = said
        .pod_resources
        .iter()
        .filter(|pod| plain(&pod.name) && plain(&pod.namespace))
        .flat_map(|pod| pod.containers.iter().map(move |container| (pod, container)))
        .filter(|(_, container)| plain(&container.name));
    let holders = containers.flat_map(|(pod, container)| {
        let gpus = container.devices.iter().filter(|d| {
            let name = d.resource_name.rsplit('/').next().unwrap_or_default();
            name == GPU || name.starts_with("gpu.") || d.resource_name.contains(MIG)
        });
        gpus.flat_map(|d| &d.device_ids).filter(|device| plain(device)).map(move |device| Holder {
            device: device.clone(),
            pod: pod.name.clone(),
            namespace: pod.namespace.clone(),
            container: container.name.clone(),
        })
    });
    PodsFact { holders: holders.take(HOLDERS).collect() }
}
