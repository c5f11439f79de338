//! One operation as NCCL 2.28 and later bring it, on prepared descriptors: nothing but the calls is in the way
//! of what is measured.

use super::abi::{self, COLL_DEFAULT, Coll, Descriptor, P2P_DEFAULT, P2p};
use super::library::{CTable, Plugin};
use std::ffi::c_void;

/// Prepared descriptors of a bare all-reduce of one communicator.
#[derive(Debug)]
pub struct Bare {
    table: &'static CTable,
    context: *mut c_void,
    group_api: Descriptor,
    coll_api: Descriptor,
    launch: Descriptor,
    group: Descriptor,
    coll: Descriptor,
    kernel: Descriptor,
    outer: Descriptor,
    pair_apis: [Descriptor; 2],
    pairs: [Descriptor; 2],
    stamp: [u64; 2],
}

const VERSION: usize = 5;

impl Bare {
    pub fn new(plugin: &Plugin, context: u64) -> Self {
        Bare {
            table: plugin.table(VERSION),
            context: context as *mut c_void,
            group_api: abi::group_api(VERSION, false, 1),
            coll_api: abi::coll_api(VERSION, 0, abi::func::ALL_REDUCE, 1024, false),
            launch: abi::kernel_launch(VERSION, 0),
            group: abi::group(VERSION),
            coll: Coll { channels: 1, ..COLL_DEFAULT }.at(VERSION),
            kernel: abi::kernel_ch(VERSION, 0, 0, 1000),
            outer: abi::group_api(VERSION, false, 2),
            pair_apis: [abi::func::SEND, abi::func::RECV].map(|f| abi::p2p_api(VERSION, 0, f, 512)),
            pairs: [abi::func::RECV, abi::func::SEND]
                .map(|func| P2p { func, peer: 1, channels: 1, ..P2P_DEFAULT }.at(VERSION)),
            stamp: [2000, 0],
        }
    }

    fn start(&self, d: &Descriptor) -> *mut c_void {
        let mut out = std::ptr::null_mut();
        // SAFETY: a descriptor of this version and a place for one handle.
        unsafe { (self.table.start)(self.context, &mut out, d.as_ptr().cast()) };
        out
    }

    /// NCCL 2.28 and later stop nothing that has no handle.
    fn stop(&self, handle: *mut c_void) {
        if !handle.is_null() {
            // SAFETY: any number is a handle.
            unsafe { (self.table.stop)(handle) };
        }
    }

    /// As [`Self::stop`].
    fn state(&self, handle: *mut c_void, state: i32, arg: *const c_void) {
        if !handle.is_null() {
            // SAFETY: NULL or the state arguments of this version.
            unsafe { (self.table.record)(handle, state, arg) };
        }
    }

    /// Captures a call into a graph, after which everything has a handle.
    pub fn capture(&mut self) {
        let mut call = abi::coll_api(VERSION, 0, abi::func::ALL_REDUCE, 1024, true);
        call.parent(self.start(&abi::group_api(VERSION, true, 1)) as u64);
        self.start(&call);
    }

    /// Makes a plan the parent of the Coll events, as up to NCCL 2.27.
    pub fn in_plan(&mut self) {
        let plan = self.start(&self.group);
        self.coll.parent(plan as u64);
    }

    /// Start and stop of the Coll event alone.
    pub fn coll(&self) -> *mut c_void {
        let coll = self.start(&self.coll);
        self.stop(coll);
        coll
    }

    /// Start, stop time and stop of one kernel.
    pub fn kernel(&mut self, coll: *mut c_void) {
        self.kernel.parent(coll as u64);
        let kernel = self.start(&self.kernel);
        self.state(kernel, 22, self.stamp.as_ptr().cast());
        self.stop(kernel);
    }

    /// A group of two all-reduces, launched together.
    pub fn group(&mut self) {
        let group = self.start(&self.outer);
        self.state(group, 23, std::ptr::null());
        self.coll_api.parent(group as u64);
        let calls = [(); 2].map(|()| {
            let call = self.start(&self.coll_api);
            self.stop(call);
            call
        });
        self.state(group, 24, std::ptr::null());
        let plan = self.start(&self.group);
        self.coll.plan(plan as u64);
        let colls = calls.map(|call| {
            self.coll.parent(call as u64);
            self.start(&self.coll)
        });
        colls.into_iter().chain([plan, group]).for_each(|handle| self.stop(handle));
    }

    /// A group of a send and a receive, which NCCL issues in its own order.
    pub fn pair(&mut self) {
        let group = self.start(&self.outer);
        self.state(group, 23, std::ptr::null());
        let calls = [0, 1].map(|i| {
            self.pair_apis[i].parent(group as u64);
            let call = self.start(&self.pair_apis[i]);
            self.stop(call);
            call
        });
        self.state(group, 24, std::ptr::null());
        let plan = self.start(&self.group);
        let pairs = [0, 1].map(|i| {
            self.pairs[i].pair_plan(plan as u64);
            self.pairs[i].parent(calls[1 - i] as u64);
            self.start(&self.pairs[i])
        });
        pairs.into_iter().chain([plan, group]).for_each(|handle| self.stop(handle));
    }

    /// Everything that NCCL says about a bare call, as far as the mask asks for it.
    pub fn call(&mut self, launch: bool) -> *mut c_void {
        let group = self.start(&self.group_api);
        self.coll_api.parent(group as u64);
        let call = self.start(&self.coll_api);
        self.state(group, 23, std::ptr::null());
        self.stop(call);
        self.state(group, 24, std::ptr::null());
        if launch {
            self.launch.parent(group as u64);
            let launch = self.start(&self.launch);
            self.stop(launch);
        }
        let plan = self.start(&self.group);
        self.coll.parent(call as u64);
        self.coll.plan(plan as u64);
        let coll = self.coll();
        self.stop(plan);
        self.stop(group);
        coll
    }
}
