//! What a store does where something ends: room on the disk, memory, descriptors, the patience of others; what it does
//! with peers that lie, with files that rot, are lost or are no files, and with a clock that jumps.

mod crowd;
mod descriptors;
mod full;
mod group;
mod holdings;
mod liar;
mod mounted;
mod processes;
mod rot;
mod strangers;
