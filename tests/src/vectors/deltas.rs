//! Deltas, alone and with their bases.

use tssd_format::{
    Archive, Compression, DeltaClasses, DeltaDraft, Dtype, Options, Shard, ShardSpec, StateDict,
    Tensor, TensorMeta, TensorSlice, Value,
};

use super::{Content, Vector, dict_of, encode, f32_tensor, file_vector, single_value};

#[expect(clippy::too_many_lines, reason = "one list of all vectors")]
pub(super) fn vectors() -> Vec<Vector> {
    let one = DeltaClasses::One;
    let bf16 = Dtype::Bfloat16;
    vec![
        file_vector("160-delta", "a delta that is opened without its base", {
            let [base, result] = few_changes(bf16, &[(3, 1), (90, 2)]);
            delta(&base, &result, one)
        }),
        set(
            "161-delta-gaps",
            "two elements that change",
            few_changes(bf16, &[(3, 1), (90, 2)]),
            one,
        ),
        set(
            "162-delta-escape",
            "a gap of more than 254 elements",
            few_changes(bf16, &[(299, 1)]),
            one,
        ),
        set(
            "163-delta-wide",
            "differences in the wide column and in that of exceptions",
            few_changes(bf16, &[(0, 0x4000), (1, 9), (2, 0x8000), (3, 1), (4, 200), (5, 0x7FC0)]),
            one,
        ),
        set(
            "164-delta-bitmap",
            "positions as a bitmap",
            versions(bf16, 300, |at| u32::from(at % 3 == 0)),
            one,
        ),
        set(
            "165-delta-frames",
            "columns as frames",
            versions(bf16, 20_000, |at| u32::from(noise(at).is_multiple_of(16))),
            one,
        ),
        set(
            "166-delta-classes",
            "three classes, of which one has bitmaps",
            trained(200_000, [2, 20, 200, 2000]),
            DeltaClasses::Four,
        ),
        set(
            "167-delta-two-classes",
            "two classes",
            trained(200_000, [2, 20, 200, 2000]),
            DeltaClasses::Two,
        ),
        set(
            "177-delta-four-classes",
            "four classes, of which two have bitmaps",
            trained(400_000, [2, 6, 24, 200]),
            DeltaClasses::Four,
        ),
        set(
            "168-delta-blocks",
            "two blocks of 65,536 elements, the second one dense",
            versions(Dtype::Float8E4m3fn, 65_600, |at| {
                if at < 65_536 { u32::from(at % 1000 == 7) } else { 1 + noise(at) % 100 }
            }),
            one,
        ),
        set(
            "169-delta-width-4",
            "elements of 4 bytes",
            few_changes(Dtype::Float32, &[(7, 1), (8, 0x0100_0000)]),
            one,
        ),
        set(
            "170-delta-width-1",
            "elements of 1 byte",
            few_changes(Dtype::Uint8, &[(7, 1), (8, 0xFF), (9, 0x80)]),
            one,
        ),
        set("171-delta-wider", "elements of 16 and 8 bytes, taken as 4 and 4", wider(), one),
        set(
            "172-delta-unchanged",
            "a tensor that does not change",
            versions(bf16, 300, |_| 0),
            one,
        ),
        set(
            "173-delta-planes",
            "a chunk of which all elements change",
            versions(bf16, 3000, |at| noise(at) % 128),
            one,
        ),
        set(
            "174-delta-whole",
            "tensors and texts that the base does not have",
            with_new_leaves(),
            one,
        ),
        set("175-delta-slices", "slices of a global tensor", slices(), one),
        set(
            "176-delta-tied",
            "two storages that have the storage of tied tensors as their base",
            tied(),
            one,
        ),
    ]
}

fn set(
    name: &'static str,
    description: &'static str,
    [base, result]: [StateDict; 2],
    classes: DeltaClasses,
) -> Vector {
    let files = vec![
        ("base.tssd".to_owned(), encode_base(&base)),
        ("delta.tssd".to_owned(), delta(&base, &result, classes)),
    ];
    Vector { name, description, content: Content::Set(files) }
}

/// Bases are compressed, because their elements repeat.
fn encode_base(base: &StateDict) -> Vec<u8> {
    encode(base, &Options::new().compress(Compression::ShuffledZstd))
}

fn delta(base: &StateDict, result: &StateDict, classes: DeltaClasses) -> Vec<u8> {
    let open = |file| Archive::from_bytes(file).expect("vectors are legal");
    let base = open(encode_base(base));
    let result = open(encode(result, &Options::new()));
    let draft = DeltaDraft::between(&base, &result, classes).expect("both are open");
    let mut file = Vec::new();
    draft.plan().and_then(|layout| layout.write_to(&mut file)).expect("a Vec takes all");
    file
}

fn noise(at: u64) -> u32 {
    u32::from(super::noise(at))
}

/// Returns element `at` of a base: patterns of few exponents, which repeat.
fn base_element(dtype: Dtype, at: u64) -> u32 {
    let step = u8::try_from(at % 16 + 1).expect("at most 16");
    let value = f32::from(step) / 16.0 * if at.is_multiple_of(3) { -1.0 } else { 1.0 };
    value.to_bits() >> (32 - 8 * dtype.itemsize())
}

fn tensor(dtype: Dtype, elements: impl Iterator<Item = u32>) -> Tensor {
    let width = usize::try_from(dtype.itemsize()).expect("at most 4");
    let bytes: Vec<u8> =
        elements.flat_map(|element| element.to_le_bytes().into_iter().take(width)).collect();
    let numel = bytes.len() as u64 / dtype.itemsize();
    let meta = TensorMeta::new(dtype, &[numel]).expect("a small shape");
    Tensor::new(meta, bytes.into(), 0).expect("there are as many bytes as it has")
}

/// Returns two versions of a tensor. `difference` is that of an element.
fn versions(dtype: Dtype, numel: u64, difference: impl Fn(u64) -> u32) -> [StateDict; 2] {
    let old = (0..numel).map(|at| base_element(dtype, at));
    let new = (0..numel).map(|at| base_element(dtype, at).wrapping_add(difference(at)));
    [single_value(tensor(dtype, old)), single_value(tensor(dtype, new))]
}

/// Returns two versions of a tensor of 300 elements that differ at these positions.
fn few_changes(dtype: Dtype, changes: &[(u64, u32)]) -> [StateDict; 2] {
    versions(dtype, 300, |at| {
        changes
            .iter()
            .find(|(position, _)| *position == at)
            .map_or(0, |(_, difference)| *difference)
    })
}

/// Returns versions in which small weights change often and large ones rarely: one of `rarities` by exponent.
fn trained(numel: u64, rarities: [u32; 4]) -> [StateDict; 2] {
    let exponent = |at: u64| (at % 128 / 32) as u32;
    let element = |at: u64| (116 + exponent(at)) << 7 | (at % 128) as u32;
    let change = |at: u64| {
        let mixed = noise(at) << 8 | noise(at + 1_000_000);
        u32::from(mixed.is_multiple_of(rarities[exponent(at) as usize]))
    };
    let old = (0..numel).map(element);
    let new = (0..numel).map(|at| element(at) + change(at));
    [single_value(tensor(Dtype::Bfloat16, old)), single_value(tensor(Dtype::Bfloat16, new))]
}

fn wider() -> [StateDict; 2] {
    [0, 1].map(|add| {
        let floats: Vec<u8> = (0..50_u64)
            .flat_map(|at| {
                let number = f64::from(u32::try_from(at).expect("at most 50")) * 0.5;
                number.to_bits().wrapping_add(add * (at % 7)).to_le_bytes()
            })
            .collect();
        let tensor = |dtype, shape: &[u64]| {
            let meta = TensorMeta::new(dtype, shape).expect("a small shape");
            Tensor::new(meta, floats.clone().into(), 0).expect("400 bytes")
        };
        dict_of(vec![
            ("complex".into(), tensor(Dtype::Complex128, &[25]).into()),
            ("double".into(), tensor(Dtype::Float64, &[50]).into()),
        ])
    })
}

fn with_new_leaves() -> [StateDict; 2] {
    let [base, mut result] = few_changes(Dtype::Bfloat16, &[(5, 1)]);
    result.insert("new", f32_tensor(&[1.0, -2.0, 0.5], &[3]));
    result.insert(
        "compressed",
        tensor(Dtype::Bfloat16, (0..3000).map(|at| base_element(Dtype::Bfloat16, at))),
    );
    result.insert("text", "long ".repeat(1000));
    result.insert("step", Value::from(7_i64));
    result.insert("empty", f32_tensor(&[], &[0]));
    [base, result]
}

fn slices() -> [StateDict; 2] {
    [0, 1].map(|add| {
        let elements: Vec<u16> = (0..160).map(|at| 0x3F80 + add * u16::from(at == 77)).collect();
        let slice =
            TensorSlice::new(&[2, 0], &[2, 80], &[4, 80]).expect("it lies in the global shape");
        let local = Tensor::from_slice(&elements, &[2, 80]).expect("160 elements");
        single_value(Shard::new(local, ShardSpec::new(slice)).expect("the shapes are equal"))
    })
}

fn tied() -> [StateDict; 2] {
    let element = |at| base_element(Dtype::Bfloat16, at);
    let changed = |every: u64| (0..300).map(move |at| element(at) + u32::from(at % every == 5));
    let base = tensor(Dtype::Bfloat16, (0..300).map(element));
    let dict = |first: &Tensor, second: &Tensor| {
        dict_of(vec![("a".into(), first.clone().into()), ("b".into(), second.clone().into())])
    };
    // In the result, each tensor has a storage of its own.
    let [first, second] = [100, 50].map(|every| tensor(Dtype::Bfloat16, changed(every)));
    [dict(&base, &base), dict(&first, &second)]
}
