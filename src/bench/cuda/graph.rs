//! CUDA graphs: what a stream was given, recorded, to be launched again or to be looked at.

#![expect(unsafe_code, reason = "calls of a C library that is loaded at run time")]

use super::{Context, Stream, kernel};
use crate::bench::error::BenchError;
use crate::bench::result::KernelLaunch;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

/// `CU_GRAPH_NODE_TYPE_KERNEL`.
const KERNEL: c_int = 0;
/// `CU_GRAPH_NODE_TYPE_HOST`: a function that NCCL has called for its own threads; outside of graphs it calls it itself.
const HOST: c_int = 3;
/// `CU_GRAPH_NODE_TYPE_WAIT_EVENT`.
const WAIT_EVENT: c_int = 6;
/// `CU_GRAPH_NODE_TYPE_EVENT_RECORD`.
const EVENT_RECORD: c_int = 7;
/// `CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES`: what a kernel's code itself declares of it.
const SHARED_BYTES: c_int = 1;

/// `CUDA_KERNEL_NODE_PARAMS`, the first version.
#[repr(C)]
pub(super) struct NodeParams {
    function: usize,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
}

/// A recorded sequence of work that can be launched again and again.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    raw: usize,
    executable: usize,
}

impl Stream {
    /// Ends the recording and makes a graph of it that can be launched.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn end_capture(&self) -> Result<Graph, BenchError> {
        self.context.enter()?;
        let f = &self.context.cuda.f;
        let mut raw = 0;
        // SAFETY: a stream that is alive, a place for one graph.
        self.context.told("cuStreamEndCapture", unsafe { (f.capture_end)(self.raw, &mut raw) })?;
        let mut graph = Graph { context: self.context.clone(), raw, executable: 0 };
        // SAFETY: a graph that is alive, a place for one executable graph.
        let code = unsafe { (f.graph_instantiate)(&mut graph.executable, raw, 0) };
        self.context.told("cuGraphInstantiateWithFlags", code)?;
        Ok(graph)
    }

    /// Launches a graph.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn launch(&self, graph: &Graph) -> Result<(), BenchError> {
        // SAFETY: both are alive.
        let code = unsafe { (self.context.cuda.f.graph_launch)(graph.executable, self.raw) };
        self.context.told("cuGraphLaunch", code)
    }
}

impl Graph {
    /// How the graph's only kernel is launched, and what stands in the stream with it; nothing where it has no kernel or
    /// several, or work of another kind.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn only_kernel(&self) -> Result<Option<KernelLaunch>, BenchError> {
        self.context.enter()?;
        let f = &self.context.cuda.f;
        let (mut kernels, mut waits, mut records) = (Vec::new(), 0, 0);
        for node in self.nodes()? {
            let mut kind = -1;
            // SAFETY: a node of a graph that is alive, a place for one int.
            self.context.told("cuGraphNodeGetType", unsafe { (f.node_type)(node, &mut kind) })?;
            match kind {
                KERNEL => kernels.push(node),
                WAIT_EVENT => waits += 1,
                EVENT_RECORD => records += 1,
                HOST => {}
                _ => return Ok(None),
            }
        }
        let &[node] = kernels.as_slice() else { return Ok(None) };
        let none = std::ptr::null_mut();
        let mut params = NodeParams {
            function: 0,
            grid: [0; 3],
            block: [0; 3],
            shared_bytes: 0,
            arguments: none,
            extra: none.cast(),
        };
        // SAFETY: a kernel's node, a place for its parameters.
        let code = unsafe { (f.node_params)(node, &mut params) };
        self.context.told("cuGraphKernelNodeGetParams", code)?;
        let mut cluster = kernel::AttributeValue::default();
        // SAFETY: as above, a place for one attribute.
        let code = unsafe { (f.node_attribute)(node, kernel::CLUSTER, &mut cluster) };
        self.context.told("cuGraphKernelNodeGetAttribute", code)?;
        let mut declared = 0;
        // SAFETY: a place for one int, the function of a kernel that is loaded.
        let code = unsafe { (f.function_attribute)(&mut declared, SHARED_BYTES, params.function) };
        self.context.told("cuFuncGetAttribute", code)?;
        Ok(Some(KernelLaunch {
            grid: params.grid,
            block: params.block,
            // A kernel that has none is told as zeros or ones.
            cluster: cluster.dimensions().map(|d| d.max(1)),
            shared_bytes: params.shared_bytes + u32::try_from(declared).unwrap_or(0),
            waits,
            records,
        }))
    }

    fn nodes(&self) -> Result<Vec<usize>, BenchError> {
        let f = &self.context.cuda.f;
        let mut count = 0;
        // SAFETY: a graph that is alive; without a place for the nodes their number is told.
        let code = unsafe { (f.graph_nodes)(self.raw, std::ptr::null_mut(), &mut count) };
        self.context.told("cuGraphGetNodes", code)?;
        let mut nodes = vec![0; count];
        // SAFETY: as above, with a place for so many.
        let code = unsafe { (f.graph_nodes)(self.raw, nodes.as_mut_ptr(), &mut count) };
        self.context.told("cuGraphGetNodes", code)?;
        nodes.truncate(count);
        Ok(nodes)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return;
        }
        let f = &self.context.cuda.f;
        if self.executable != 0 {
            // SAFETY: made by us, destroyed once. A failure at the end changes nothing.
            unsafe { (f.graph_exec_destroy)(self.executable) };
        }
        if self.raw != 0 {
            // SAFETY: as above.
            unsafe { (f.graph_destroy)(self.raw) };
        }
    }
}
