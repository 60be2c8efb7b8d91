//! The other process: it has tensors of its own on the same device, which are filled as it is told.

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tssd_format::{Dtype, TensorMeta};
use tssd_gpu::Device;
use tssd_store::GetOptions;
use tssd_store::blocking::{Receiver, Store};
use tssd_tests::bench::peer::{self, Peer};
use tssd_tests::caller::DeviceContext;

use crate::handles::{self, Handles};
use crate::packed::{self, Bucket};
use crate::weights::Weights;
use crate::{ORDINAL, SOON, key};

const ROLE: &str = "reader";

/// What it is told, a line of JSON each; it says when it has done it.
#[derive(Serialize, Deserialize)]
pub(crate) enum Ask {
    /// The first one: where the daemon is, and the names and shapes of tensors of bfloat16.
    Begin { url: String, tensors: Vec<(String, Vec<u64>)> },
    /// To receive the next version of a key.
    Receive(String),
    /// To get the newest version of a key.
    Get(String),
    /// To copy from memory that each tensor has a handle of.
    Handles(Handles),
    /// To copy from a bucket.
    Bucket(Bucket),
    /// To forget what it has.
    Clear,
    /// To say the checksum of each tensor.
    Sums,
}

pub(crate) fn is_child() -> bool {
    let is_child = peer::role().as_deref() == Some(ROLE);
    if is_child {
        peer::send_to_parent(&["here"]);
        serve();
    }
    is_child
}

fn told() -> Option<Ask> {
    Some(serde_json::from_str(&peer::receive_from_parent()?).unwrap())
}

fn serve() {
    let Some(Ask::Begin { url, tensors }) = told() else { return };
    let meta = |(name, shape): (String, Vec<u64>)| {
        (name, TensorMeta::new(Dtype::Bfloat16, &shape).unwrap())
    };
    let shapes: Vec<(String, TensorMeta)> = tensors.into_iter().map(meta).collect();
    let (caller, device) = (DeviceContext::new(ORDINAL), &Device::all().unwrap()[ORDINAL]);
    let (weights, store) = (Weights::new(&caller, &shapes), Store::connect(&url).unwrap());
    let memories = weights.memories(&caller);
    let (mut receivers, mut opened) = (BTreeMap::<String, Receiver>::new(), None);
    peer::send_to_parent(&["ready"]);
    while let Some(ask) = told() {
        let mut targets = weights.targets(&memories);
        match ask {
            Ask::Begin { .. } => unreachable!("it has begun"),
            Ask::Receive(name) => {
                let begin = || store.receiver(&key(&name), Some(&device.uuid())).unwrap();
                let receiver = receivers.entry(name.clone()).or_insert_with(begin);
                receiver.receive(&mut targets, &GetOptions::default(), SOON).unwrap();
            }
            Ask::Get(name) => {
                store
                    .get_state_dict_into(&key(&name), &mut targets, &GetOptions::default())
                    .unwrap();
            }
            Ask::Handles(handles) => handles::copy(&caller, &weights, &handles),
            Ask::Bucket(bucket) => packed::unpack(&caller, &weights, &mut opened, &bucket),
            Ask::Clear => weights.clear(&caller),
            Ask::Sums => {
                let sums: Vec<String> = weights.sums(&caller).iter().map(u32::to_string).collect();
                peer::send_to_parent(&sums.iter().map(String::as_str).collect::<Vec<_>>());
                continue;
            }
        }
        peer::send_to_parent(&["done"]);
    }
}

/// The other process, from here.
pub(crate) struct Reader(RefCell<Peer>);

impl Reader {
    /// Starts it.
    pub(crate) fn new(url: &str, shapes: &[(String, TensorMeta)]) -> Self {
        let mut peer = Peer::start(ROLE);
        let tensors =
            shapes.iter().map(|(name, meta)| (name.clone(), meta.shape().to_vec())).collect();
        peer.send(&serde_json::to_string(&Ask::Begin { url: url.to_owned(), tensors }).unwrap());
        assert_eq!(peer.receive(), ["ready"]);
        Self(RefCell::new(peer))
    }

    /// Tells it what to do, does something meanwhile, and waits until both is done.
    pub(crate) fn meanwhile(&self, ask: &Ask, work: impl FnOnce()) {
        let mut peer = self.0.borrow_mut();
        peer.send(&serde_json::to_string(ask).unwrap());
        work();
        assert_eq!(peer.receive(), ["done"]);
    }

    /// Tells it what to do, and waits until it is done.
    pub(crate) fn ask(&self, ask: &Ask) {
        self.meanwhile(ask, || {});
    }

    /// After one more turn, which begins with nothing, it must have what the weights are.
    pub(crate) fn expect_all(&self, sums: &[u32], turn: impl FnOnce()) {
        self.ask(&Ask::Clear);
        turn();
        let mut peer = self.0.borrow_mut();
        peer.send(&serde_json::to_string(&Ask::Sums).unwrap());
        let found: Vec<u32> = peer.receive().iter().map(|sum| sum.parse().unwrap()).collect();
        assert!(found == sums, "what has come is not what was put");
    }
}
