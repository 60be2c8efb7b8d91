//! The public API of the store.

pub mod blocking;
mod connect;
pub mod file;
mod follower;
mod publisher;
mod reader;
mod scrub;
mod store;
mod subscription;
mod wait;

pub use self::connect::ConnectOptions;
pub use self::follower::Follower;
pub use self::publisher::{Parts, Publisher};
pub use self::reader::VersionReader;
pub use self::scrub::{Defect, is_stored_delta, scrub};
pub use self::store::{PrefetchReport, Store};
pub use self::subscription::Subscription;
pub use self::wait::{SeenVersion, WaitOptions};
