//! Tensors of GPUs, put and got.
//!
//! On a machine with a GPU: `cargo test -p tssd-tests --features cuda --test gpu -- --ignored`. Everywhere else they run
//! on a driver without one, which is told to take its time.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "the caller's tensors are made here")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "tests count small things, and fail by panicking"
)]

mod get;
mod put;
mod ring;
mod snapshot;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use tssd_format::{StateDict, Value};
use tssd_gpu::Device;
use tssd_store::{ErrorKind, Key};
use tssd_tests::command::preload_library;

fn key() -> Key {
    Key::new("policy").unwrap()
}

/// Bytes that are others at each place and in each version.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (at, word) in (seed << 32..).zip(bytes.chunks_mut(8)) {
        let mixed = at.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29).to_le_bytes();
        word.copy_from_slice(&mixed[..word.len()]);
    }
    bytes
}

/// The bytes of a tensor that was got to the host's memory.
fn bytes_of(dict: &StateDict, fqn: &str) -> Vec<u8> {
    let Value::Tensor(tensor) = dict.leaf(fqn).unwrap().clone() else { panic!("a tensor") };
    tensor.view().span().to_vec()
}

/// Runs the tests that need a GPU in a process that finds this driver.
fn run(driver: Option<&Path>, environment: &[(&str, &str)], test: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    if let Some(driver) = driver {
        std::os::unix::fs::symlink(driver, folder.path().join("libcuda.so")).unwrap();
    }
    set(test, environment).env("LD_LIBRARY_PATH", folder.path()).output().unwrap()
}

/// These tests in a process of their own.
fn set(test: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--ignored", "--test-threads=2"]).envs(environment.iter().copied());
    command
}

/// A process that does what a test of this name says.
fn child(test: &str, environment: &[(&str, &str)]) -> Child {
    set(test, environment).stdout(Stdio::null()).spawn().unwrap()
}

fn expect_success(output: &Output) {
    let (out, error) = (&output.stdout, &output.stderr);
    let text = [out, error].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{}{}", text[0], text[1]);
}

/// The tests of a driver that has everything.
const ALL: &[&str] = &[
    "get::",
    "put::what",
    "put::bytes",
    "put::the",
    "put::memory",
    "put::many_chunks",
    "put::many_tensors",
    "ring::",
    "snapshot::",
];

#[test]
fn all_of_it_on_a_driver_without_a_gpu() {
    let little = [("TSSD_FAKE_CUDA_DELAY", "100"), ("TSSD_FAKE_CUDA_MEMORY", "20000000")];
    for (environment, tests) in [
        // What counts is alone in its process.
        (&[("TSSD_FAKE_CUDA_DELAY", "0")][..], ALL),
        (&[("TSSD_FAKE_CUDA_DELAY", "1000"), ("TSSD_FAKE_CUDA_DEVICES", "2")], ALL),
        (
            &[("TSSD_FAKE_CUDA_NO_VMM", "1")],
            &["ring::handles", "ring::readers", "ring::what_is_lent", "snapshot::where"],
        ),
        (&little, &["snapshot::a_device_that_is_full"]),
    ] {
        for test in tests {
            let output = run(Some(&preload_library("tssd-fake-cuda")), environment, test);
            expect_success(&output);
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(!text.contains("left out") && !text.contains("ok. 0 passed"), "{text}");
        }
    }
}

/// A machine without a driver, with one that is no driver, or with one and no device.
#[test]
fn what_is_missing_is_said() {
    let none = ("TSSD_TESTS_EXPECT", "there is no driver here");
    let no_device = ("TSSD_TESTS_EXPECT", "CUDA_ERROR_NO_DEVICE");
    let too_old = ("TSSD_TESTS_EXPECT", "the driver is too old: it has no cuCtxPopCurrent_v2");
    let no_driver = Path::new("/usr/lib/x86_64-linux-gnu/libm.so.6");
    let missing = "what_is_missing_is_an_error";
    if no_driver.exists() {
        expect_success(&run(Some(no_driver), &[too_old], missing));
    } else {
        println!("left out: there is no {}", no_driver.display());
    }
    expect_success(&run(
        Some(&preload_library("tssd-fake-cuda")),
        &[no_device, ("TSSD_FAKE_CUDA_DEVICES", "0")],
        missing,
    ));
    let found = run(None, &[none], missing);
    if String::from_utf8_lossy(&found.stdout).contains("a driver was found") {
        println!("left out: this machine has a driver");
    } else {
        expect_success(&found);
    }
}

/// In a process that lacks something.
#[test]
#[ignore = "needs to be told what is missing"]
fn what_is_missing_is_an_error() {
    let Ok(expected) = std::env::var("TSSD_TESTS_EXPECT") else { return };
    let Err(error) = Device::all() else { panic!("a driver was found") };
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(
        error.to_string().contains("no CUDA") && error.to_string().contains(&expected),
        "{error}"
    );
    // The same again, and for tensors.
    assert_eq!(Device::all().unwrap_err().to_string(), error.to_string());
    // SAFETY: nothing is read: there is no driver.
    let memory = unsafe { tssd_gpu::DeviceMemory::new(4096, 1, tssd_gpu::Stream::default(), ()) };
    assert_eq!(memory.unwrap_err().kind(), ErrorKind::Unsupported);
}
