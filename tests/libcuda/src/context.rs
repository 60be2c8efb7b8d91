//! Contexts: each device has one, and each thread a stack of those that are current.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};

use crate::devices;
use crate::result::Code;

/// Contexts are numbers that are no addresses: the device's and this.
const FIRST: usize = 0xC0DE_0000;

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// What this thread minds while others capture.
    static CAPTURE: Cell<c_int> = const { Cell::new(0) };
}

/// Gives a thread another one.
pub(crate) fn exchange_capture(mode: c_int) -> Result<c_int, Code> {
    if (0..=2).contains(&mode) { Ok(CAPTURE.replace(mode)) } else { Err(Code::InvalidValue) }
}

/// The primary context of a device.
pub(crate) fn of(device: c_int) -> Result<*mut c_void, Code> {
    let number = usize::try_from(device).ok().filter(|_| device < devices());
    let number = number.ok_or(Code::InvalidDevice)?;
    Ok(std::ptr::without_provenance_mut(FIRST + number))
}

fn check(context: usize) -> Result<(), Code> {
    let count = usize::try_from(devices()).unwrap_or(0);
    if (FIRST..FIRST + count).contains(&context) { Ok(()) } else { Err(Code::InvalidContext) }
}

pub(crate) fn current() -> *mut c_void {
    let top = CURRENT.with_borrow(|stack| stack.last().copied());
    std::ptr::without_provenance_mut(top.unwrap_or(0))
}

pub(crate) fn set(context: *mut c_void) -> Result<(), Code> {
    CURRENT.with_borrow_mut(Vec::pop);
    if context.is_null() { Ok(()) } else { push(context) }
}

pub(crate) fn push(context: *mut c_void) -> Result<(), Code> {
    check(context.addr())?;
    CURRENT.with_borrow_mut(|stack| stack.push(context.addr()));
    Ok(())
}

pub(crate) fn pop() -> Result<*mut c_void, Code> {
    let popped = CURRENT.with_borrow_mut(Vec::pop).ok_or(Code::InvalidContext)?;
    Ok(std::ptr::without_provenance_mut(popped))
}

/// The device of this thread's context: most calls need one.
pub(crate) fn device() -> Result<c_int, Code> {
    let current = current().addr();
    check(current)?;
    c_int::try_from(current - FIRST).map_err(|_| Code::InvalidContext)
}
