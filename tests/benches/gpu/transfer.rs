//! Transfers of a version from one process into the tensors of another process on the same device.

use tssd_format::{Dtype, TensorMeta};
use tssd_store::{PutOptions, Residency, Ring, Transport};
use tssd_tests::bench::{Bench, Race, Runner, Target, expert_name, shapes_of};
use tssd_tests::device_context::DeviceContext;
use tssd_tests::test_daemon::TestDaemon;

use crate::packed::Packer;
use crate::reader::{Command, Reader};
use crate::weights::Weights;
use crate::{ORDINAL, TIMEOUT, handles, key};

const COPIES: &str = "two plain copies";
const HANDLES: &str = "a handle for each tensor";
const PACKED: &str = "packed, one dtype";

/// Transfers the tensors of a model.
pub(crate) fn model_tensors(bench: &mut Bench) {
    let (name, shapes) = shapes_of(&bench.options);
    race(bench, &name, &shapes, 5.0);
}

/// Transfers the same number of bytes in 20,000 tensors.
pub(crate) fn many_tensors(bench: &mut Bench) {
    const TENSORS: usize = 20_000;
    let (_, shapes) = shapes_of(&bench.options);
    let bytes: u64 = shapes.iter().map(|(_, meta)| meta.nbytes()).sum();
    let meta = TensorMeta::new(Dtype::Bfloat16, &[(bytes / 2 / TENSORS as u64).max(1)]).unwrap();
    let shapes = (0..TENSORS).map(|number| (expert_name(number), meta.clone()));
    race(bench, "experts", &shapes.collect::<Vec<_>>(), 50.0);
}

/// Races all kinds of transfer. `min_speed` is the target relative to a handle for each tensor.
fn race(bench: &mut Bench, name: &str, shapes: &[(String, TensorMeta)], min_speed: f64) {
    let caller = &DeviceContext::new(ORDINAL);
    let weights = &Weights::new(caller, shapes);
    weights.write(caller);
    let sums = weights.checksums(caller);
    let served = TestDaemon::new(64 << 20);
    let (store, reader) = (served.connect(), &Reader::new(&served.url(), shapes));
    let put = |name: &str, residency| {
        let require = Some(Transport::CudaIpc);
        let options = PutOptions {
            residency,
            require_transport: require,
            timeout: TIMEOUT,
            ..PutOptions::default()
        };
        store.put_state_dict(&key(name), &weights.dict(caller), &options).unwrap();
    };
    let transfer = |name: &str, residency| {
        reader.send_during(&Command::Receive(name.to_owned()), || put(name, residency));
    };
    let ring = || transfer("ring", Residency::Ring(Ring::default()));
    let in_place = || transfer("in_place", Residency::InPlace(Ring::default()));
    let device = || {
        put("device", Residency::Device);
        reader.send(&Command::Get("device".to_owned()));
    };
    let packer = Packer::new(caller, weights);
    let (packed, handles) = (|| packer.publish(reader), || handles::publish(weights, reader));
    let len = usize::try_from(weights.bytes()).unwrap();
    let [one, other] = [(); 2].map(|()| caller.allocate(len));
    let copies = || {
        caller.enqueue_copy((&other, 0), (&one, 0), len);
        caller.enqueue_copy((&one, 0), (&other, 0), len);
        caller.synchronize();
    };
    let what = "a new version, from one process into the tensors of another one on the same GPU";
    bench.race(
        Race::new("across", what, 9)
            .with_tensors(name, shapes.len())
            .with_bytes(weights.bytes())
            .with_runner(
                // At most 1.3 times the duration of the copies.
                Runner::ours("tssd, through a ring", ring)
                    .with_target(Target::Speed(0.77, COPIES))
                    .with_target(Target::Speed(min_speed, HANDLES))
                    .with_target(Target::Speed(1.0, PACKED)),
            )
            .with_runner(Runner::variant("tssd, in place", in_place))
            .with_runner(Runner::variant("tssd, kept on the device", device))
            .with_runner(Runner::peer(HANDLES, handles))
            .with_runner(Runner::peer(PACKED, packed))
            .with_runner(Runner::limit(COPIES, copies)),
    );
    for turn in [&ring as &dyn Fn(), &in_place, &device, &handles, &packed] {
        reader.check_transfer(&sums, turn);
    }
}
