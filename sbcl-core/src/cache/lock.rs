//! Locks between builds, held by an open file: the system releases them when a process ends, however it ends.

use std::fs::{File, TryLockError};
use std::path::Path;

use crate::error::{Error, IoContext};
use crate::progress::Progress;

/// Takes the lock of this file, waiting for another build if it must. Dropping the result releases it.
pub(crate) fn take(path: &Path, progress: &Progress) -> Result<File, Error> {
    let file = File::create(path).doing("making the lock", path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            progress.say(format_args!("waiting for another build, which holds {}", path.display()));
            file.lock().doing("waiting for the lock", path)?;
        }
        Err(TryLockError::Error(error)) => return Err(error).doing("taking the lock", path),
    }
    Ok(file)
}
