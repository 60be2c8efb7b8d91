//! Contexts: each device has one, and each thread has a stack of current contexts.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};

use crate::device_count;
use crate::result::Code;

/// Context of device 0. The context of device `n` is this plus `n`. Contexts are not addresses.
const BASE: usize = 0xC0DE_0000;

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// Stream capture mode of this thread.
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

/// Sets the stream capture mode of this thread, and returns the previous one.
pub(crate) fn exchange_capture(mode: c_int) -> Result<c_int, Code> {
    if (0..=2).contains(&mode) { Ok(CAPTURE_MODE.replace(mode)) } else { Err(Code::InvalidValue) }
}

/// Returns the primary context of a device.
pub(crate) fn primary(device: c_int) -> Result<*mut c_void, Code> {
    let number = usize::try_from(device).ok().filter(|_| device < device_count());
    let number = number.ok_or(Code::InvalidDevice)?;
    Ok(std::ptr::without_provenance_mut(BASE + number))
}

fn check(context: usize) -> Result<(), Code> {
    let count = usize::try_from(device_count()).unwrap_or(0);
    if (BASE..BASE + count).contains(&context) { Ok(()) } else { Err(Code::InvalidContext) }
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

/// Returns the device of the current context of this thread. Most calls need one.
pub(crate) fn current_device() -> Result<c_int, Code> {
    let current = current().addr();
    check(current)?;
    c_int::try_from(current - BASE).map_err(|_| Code::InvalidContext)
}
