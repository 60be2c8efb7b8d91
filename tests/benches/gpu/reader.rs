//! The reader process: it fills its own tensors on the same device, as commanded by the parent process.

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tssd_format::{Dtype, TensorMeta};
use tssd_gpu::Device;
use tssd_store::GetOptions;
use tssd_store::blocking::{Receiver, Store};
use tssd_tests::bench::peer::{self, Peer};
use tssd_tests::device_context::DeviceContext;

use crate::handles::{self, Handles};
use crate::packed::{self, Bucket};
use crate::weights::Weights;
use crate::{ORDINAL, TIMEOUT, key};

const ROLE: &str = "reader";

/// A command to the reader, as one line of JSON. The reader acknowledges its completion.
#[derive(Serialize, Deserialize)]
pub(crate) enum Command {
    /// Connects to the daemon at this URL, and allocates bfloat16 tensors of these names and shapes.
    ///
    /// The first command.
    Begin { url: String, tensors: Vec<(String, Vec<u64>)> },
    /// Receives the next version of a key.
    Receive(String),
    /// Gets the newest version of a key.
    Get(String),
    /// Copies the tensors from memory that is shared by a handle for each tensor.
    Handles(Handles),
    /// Copies the tensors from a bucket.
    Bucket(Bucket),
    /// Clears the tensors.
    Clear,
    /// Sends the checksum of each tensor.
    Sums,
}

/// Runs the reader if this process is one. Returns whether it is.
pub(crate) fn run_if_child() -> bool {
    let is_child = peer::role().as_deref() == Some(ROLE);
    if is_child {
        peer::send_to_parent(&["here"]);
        serve();
    }
    is_child
}

/// Receives the next command. `None` if the parent has ended.
fn receive_command() -> Option<Command> {
    Some(serde_json::from_str(&peer::receive_from_parent()?).unwrap())
}

fn serve() {
    let Some(Command::Begin { url, tensors }) = receive_command() else { return };
    let meta = |(name, shape): (String, Vec<u64>)| {
        (name, TensorMeta::new(Dtype::Bfloat16, &shape).unwrap())
    };
    let shapes: Vec<(String, TensorMeta)> = tensors.into_iter().map(meta).collect();
    let (caller, device) = (DeviceContext::new(ORDINAL), &Device::all().unwrap()[ORDINAL]);
    let (weights, store) = (Weights::new(&caller, &shapes), Store::connect(&url).unwrap());
    let memories = weights.device_memories(&caller);
    let (mut receivers, mut opened) = (BTreeMap::<String, Receiver>::new(), None);
    peer::send_to_parent(&["ready"]);
    while let Some(command) = receive_command() {
        let mut targets = weights.targets(&memories);
        match command {
            Command::Begin { .. } => unreachable!("it has begun"),
            Command::Receive(name) => {
                let begin = || store.receiver(&key(&name), Some(&device.uuid())).unwrap();
                let receiver = receivers.entry(name.clone()).or_insert_with(begin);
                receiver.receive(&mut targets, &GetOptions::default(), TIMEOUT).unwrap();
            }
            Command::Get(name) => {
                store
                    .get_state_dict_into(&key(&name), &mut targets, &GetOptions::default())
                    .unwrap();
            }
            Command::Handles(handles) => handles::copy(&caller, &weights, &handles),
            Command::Bucket(bucket) => packed::unpack(&caller, &weights, &mut opened, &bucket),
            Command::Clear => weights.clear(&caller),
            Command::Sums => {
                let sums: Vec<String> =
                    weights.checksums(&caller).iter().map(u32::to_string).collect();
                peer::send_to_parent(&sums.iter().map(String::as_str).collect::<Vec<_>>());
                continue;
            }
        }
        peer::send_to_parent(&["done"]);
    }
}

/// The reader process, as controlled by the parent process.
pub(crate) struct Reader(RefCell<Peer>);

impl Reader {
    /// Starts the process.
    pub(crate) fn new(url: &str, shapes: &[(String, TensorMeta)]) -> Self {
        let mut peer = Peer::start(ROLE);
        let tensors =
            shapes.iter().map(|(name, meta)| (name.clone(), meta.shape().to_vec())).collect();
        peer.send(
            &serde_json::to_string(&Command::Begin { url: url.to_owned(), tensors }).unwrap(),
        );
        assert_eq!(peer.receive(), ["ready"]);
        Self(RefCell::new(peer))
    }

    /// Sends a command, runs `work` while the reader executes it, and waits for both.
    pub(crate) fn send_during(&self, command: &Command, work: impl FnOnce()) {
        let mut peer = self.0.borrow_mut();
        peer.send(&serde_json::to_string(command).unwrap());
        work();
        assert_eq!(peer.receive(), ["done"]);
    }

    /// Sends a command, and waits until the reader has executed it.
    pub(crate) fn send(&self, command: &Command) {
        self.send_during(command, || {});
    }

    /// Clears the tensors of the reader, runs a turn, and compares the checksums.
    pub(crate) fn check_transfer(&self, sums: &[u32], turn: impl FnOnce()) {
        self.send(&Command::Clear);
        turn();
        let mut peer = self.0.borrow_mut();
        peer.send(&serde_json::to_string(&Command::Sums).unwrap());
        let found: Vec<u32> = peer.receive().iter().map(|sum| sum.parse().unwrap()).collect();
        assert!(found == sums, "what has come is not what was put");
    }
}
