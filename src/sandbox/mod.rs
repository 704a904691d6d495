//! The rights that `--no-network` and `--read-only` take from this process and all that it starts, for good.
//!
//! This is a seat belt, not a sandbox: it covers what honest code does, but does not limit, for one, what other
//! processes do when asked through Unix sockets.

#[cfg(target_os = "linux")]
mod files;
#[cfg(target_os = "linux")]
mod network;

use clap::Args;

use crate::recovery::checkpoint::store::Checkpoints;

/// The options that restrict Lisp and the programs that it starts.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct Confinement {
    /// Allow Lisp and the programs it starts no sockets except Unix sockets (Linux).
    #[arg(long)]
    no_network: bool,
    /// Let Lisp and the programs it starts write files only in the temporary directory, ASDF's cache and the
    /// checkpoint directory (Linux).
    #[arg(long)]
    read_only: bool,
}

impl Confinement {
    /// Drops the rights. Must be called before other threads exist, which would keep them.
    ///
    /// # Errors
    /// Returns a sentence that names the option and says why this system cannot do it. To serve without the restriction
    /// would break the promise of the option.
    #[cfg(target_os = "linux")]
    pub(crate) fn apply(self, checkpoints: Option<&Checkpoints>) -> Result<(), String> {
        if self.read_only {
            // Landlock rules need existing paths. If the directory cannot be created, there are no checkpoints.
            let directory = checkpoints.and_then(|checkpoints| checkpoints.make_directory().ok());
            files::confine(directory).map_err(|reason| format!("--read-only is not available here: {reason}"))?;
        }
        if self.no_network {
            network::confine().map_err(|reason| format!("--no-network is not available here: {reason}"))?;
        }
        Ok(())
    }

    /// Returns an error: the options need Linux.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn apply(self, _: Option<&Checkpoints>) -> Result<(), String> {
        if self.read_only || self.no_network {
            return Err("--no-network and --read-only need Linux".to_owned());
        }
        Ok(())
    }
}
