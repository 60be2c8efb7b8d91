//! Puts and gets over volumes, ledgers and controllers.

pub(crate) mod address;
pub(crate) mod context;
pub(crate) mod get;
pub(crate) mod lazy_path;
pub(crate) mod local;
pub(crate) mod put;
pub(crate) mod ring;
pub(crate) mod version;
