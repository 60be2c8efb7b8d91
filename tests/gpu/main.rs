//! Puts and gets of GPU tensors.
//!
//! `cargo xtask gpu-bundle` assembles these tests for a machine with a GPU. On other machines they run on the fake CUDA
//! driver, with delays.
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

/// Returns pseudorandom bytes that depend on the seed and on their position.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (at, word) in (seed << 32..).zip(bytes.chunks_mut(8)) {
        let mixed = at.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29).to_le_bytes();
        word.copy_from_slice(&mixed[..word.len()]);
    }
    bytes
}

/// Returns the bytes of a tensor in host memory.
fn bytes_of(dict: &StateDict, fqn: &str) -> Vec<u8> {
    let Value::Tensor(tensor) = dict.leaf(fqn).unwrap().clone() else { panic!("a tensor") };
    tensor.view().span().to_vec()
}

/// Runs matching tests that need a GPU in a new process, with this file as its CUDA driver.
fn run_tests(driver: Option<&Path>, environment: &[(&str, &str)], test: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    if let Some(driver) = driver {
        std::os::unix::fs::symlink(driver, folder.path().join("libcuda.so")).unwrap();
    }
    test_command(test, environment).env("LD_LIBRARY_PATH", folder.path()).output().unwrap()
}

/// Returns a command that runs matching tests in a new process.
fn test_command(test: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--ignored", "--test-threads=2"]).envs(environment.iter().copied());
    command
}

/// Starts a process that runs the test of this name.
fn spawn_test(test: &str, environment: &[(&str, &str)]) -> Child {
    test_command(test, environment).stdout(Stdio::null()).spawn().unwrap()
}

fn expect_success(output: &Output) {
    let (out, error) = (&output.stdout, &output.stderr);
    let text = [out, error].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{}{}", text[0], text[1]);
}

/// Filters that select all tests of a driver with all features.
const ALL: &[&str] = &[
    "get::",
    "put::put",
    "put::publisher",
    "put::archive",
    "put::non_device",
    "put::current",
    "put::daemon",
    "put::many_chunks",
    "put::many_tensors",
    "ring::",
    "snapshot::",
];

#[test]
fn gpu_tests_pass_on_fake_driver() {
    let little_memory = [("TSSD_FAKE_CUDA_DELAY", "100"), ("TSSD_FAKE_CUDA_MEMORY", "20000000")];
    for (environment, tests) in [
        // Each filter has its own process, since some tests count calls and bytes.
        (&[("TSSD_FAKE_CUDA_DELAY", "0")][..], ALL),
        (&[("TSSD_FAKE_CUDA_DELAY", "1000"), ("TSSD_FAKE_CUDA_DEVICES", "2")], ALL),
        (
            &[("TSSD_FAKE_CUDA_NO_VMM", "1")],
            &[
                "ring::receive_fails",
                "ring::dead_readers",
                "ring::in_place_put_is_copied",
                "snapshot::report",
            ],
        ),
        (&little_memory, &["snapshot::full_device"]),
    ] {
        for test in tests {
            let output = run_tests(Some(&preload_library("tssd-fake-cuda")), environment, test);
            expect_success(&output);
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(!text.contains("left out") && !text.contains("ok. 0 passed"), "{text}");
        }
    }
}

/// Without a driver, with a library that is not a driver, and with a driver without a device.
#[test]
fn missing_driver_or_device_is_reported() {
    let no_library = ("TSSD_TESTS_EXPECT", "there is no driver here");
    let no_device = ("TSSD_TESTS_EXPECT", "CUDA_ERROR_NO_DEVICE");
    let too_old = ("TSSD_TESTS_EXPECT", "the driver is too old: it has no cuCtxPopCurrent_v2");
    let other_library = Path::new("/usr/lib/x86_64-linux-gnu/libm.so.6");
    let test = "devices_fail_without_driver";
    if other_library.exists() {
        expect_success(&run_tests(Some(other_library), &[too_old], test));
    } else {
        println!("left out: there is no {}", other_library.display());
    }
    expect_success(&run_tests(
        Some(&preload_library("tssd-fake-cuda")),
        &[no_device, ("TSSD_FAKE_CUDA_DEVICES", "0")],
        test,
    ));
    let output = run_tests(None, &[no_library], test);
    if String::from_utf8_lossy(&output.stdout).contains("a driver was found") {
        println!("left out: this machine has a driver");
    } else {
        expect_success(&output);
    }
}

/// Runs in a process without a driver or without a device.
#[test]
#[ignore = "needs to be told what is missing"]
fn devices_fail_without_driver() {
    let Ok(expected) = std::env::var("TSSD_TESTS_EXPECT") else { return };
    let Err(error) = Device::all() else { panic!("a driver was found") };
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(
        error.to_string().contains("no CUDA") && error.to_string().contains(&expected),
        "{error}"
    );
    // A second call and the creation of device memory return the same error.
    assert_eq!(Device::all().unwrap_err().to_string(), error.to_string());
    // SAFETY: there is no driver, so the pointer is not accessed.
    let memory = unsafe { tssd_gpu::DeviceMemory::new(4096, 1, tssd_gpu::Stream::default(), ()) };
    assert_eq!(memory.unwrap_err().kind(), ErrorKind::Unsupported);
}
