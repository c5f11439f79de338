//! `ringwatch bench --compare`.
use crate::bench::{Launch, Settings};
use crate::cli::Bench;
pub(super) fn run(_: &Bench, _: &Settings, _: Option<&Launch>) -> anyhow::Result<u8> {
    anyhow::bail!("--compare comes with the next commit")
}
