//! Locks between builds. An open file holds the lock, so the system releases it when the process ends in any way.

use std::fs::{File, TryLockError};
use std::path::Path;

use crate::error::{Error, IoContext};
use crate::progress::Progress;

/// Takes the lock of this file, after waiting for another build if necessary. Dropping the result releases the lock.
pub(crate) fn acquire(path: &Path, progress: &Progress) -> Result<File, Error> {
    let file = File::create(path).context("creating the lock", path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            progress.say(format_args!("waiting for another build to release {}", path.display()));
            file.lock().context("waiting for the lock", path)?;
        }
        Err(TryLockError::Error(error)) => return Err(error).context("acquiring the lock", path),
    }
    Ok(file)
}
