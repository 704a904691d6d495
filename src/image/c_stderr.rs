//! C code's stream `stderr`, redirected to a function that does not wait for a reader.
//!
//! SBCL's runtime prints in signal handlers, for example when a stack is exhausted. If it waited there because nobody reads
//! the process's stderr, the thread could neither be interrupted nor be stopped for a collection.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// The functions of a stream of `fopencookie(3)`: glibc's `cookie_io_functions_t`.
#[repr(C)]
struct StreamFunctions {
    read: Option<unsafe extern "C" fn(*mut c_void, *mut c_char, usize) -> isize>,
    write: Option<unsafe extern "C" fn(*mut c_void, *const c_char, usize) -> isize>,
    seek: Option<unsafe extern "C" fn(*mut c_void, *mut i64, c_int) -> c_int>,
    close: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: StreamFunctions) -> *mut libc::FILE;
    static mut stderr: *mut libc::FILE;
}

/// The function that receives what C code prints.
static WRITE: OnceLock<fn(&[u8])> = OnceLock::new();

unsafe extern "C" fn write(_: *mut c_void, text: *const c_char, length: usize) -> isize {
    if let Some(write) = WRITE.get() {
        // SAFETY: glibc passes `length` octets at `text`.
        write(unsafe { std::slice::from_raw_parts(text.cast(), length) });
    }
    length.cast_signed()
}

/// Makes C code pass what it prints to `stderr` to `new_write`, which must neither wait nor allocate memory, because signal
/// handlers may print. Must be called before the process has other threads. Later calls do nothing.
pub(crate) fn redirect(new_write: fn(&[u8])) {
    if WRITE.set(new_write).is_err() {
        return;
    }
    let functions = StreamFunctions { read: None, write: Some(write), seek: None, close: None };
    // SAFETY: the mode is a C string, the functions are those that glibc declares, and the stream is never closed. glibc lets
    // programs assign `stderr`, and the caller guarantees that no other thread uses the variable.
    unsafe {
        let file = fopencookie(std::ptr::null_mut(), c"w".as_ptr(), functions);
        if !file.is_null() {
            libc::setvbuf(file, std::ptr::null_mut(), libc::_IONBF, 0);
            stderr = file;
        }
    }
}
