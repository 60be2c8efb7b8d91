//! Many tiny tensors.

use tssd_format::{StateDict, Tensor};
use tssd_store::GetOptions;
use tssd_tests::race::{Runner, Target, race};
use tssd_tests::served::Served;

use crate::copies::put_one;
use crate::house::key;

pub(crate) fn put_and_get() {
    let mut dict = StateDict::new();
    for number in 0..20_000_u16 {
        let tensor = Tensor::from_slice(&[f32::from(number)], &[1]).unwrap();
        dict.insert(format!("layers.{number}.scale"), tensor);
    }
    let served = Served::new(16 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    let run = || {
        put_one(&writer, &dict);
        let (got, _) = reader.get_state_dict(&key(), &GetOptions::default()).unwrap();
        assert_eq!(got.entries().len(), dict.entries().len());
    };
    race(
        "put and get 20,000 tensors of one element",
        None,
        11,
        vec![Runner::new("put and get", run).target(Target::Milliseconds(60.0))],
    );
}
