//! The options `--no-network` and `--read-only`, which permanently restrict this process and the programs that it starts.
//!
//! The options guard against accidents, not against malicious code: for example, they do not limit other processes that
//! Lisp reaches through Unix sockets.

#[cfg(target_os = "linux")]
mod files;
#[cfg(target_os = "linux")]
mod network;

use clap::Args;

use crate::recovery::checkpoint::store::Checkpoints;

/// The options that restrict Lisp and the programs that it starts.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct Confinement {
    /// Prevent Lisp and the programs it starts from creating sockets, except Unix sockets (Linux).
    #[arg(long)]
    no_network: bool,
    /// Prevent Lisp and the programs it starts from writing files outside the temporary directory, ASDF's cache and the
    /// checkpoint directory (Linux 6.2 or later).
    #[arg(long)]
    read_only: bool,
}

impl Confinement {
    /// Applies the restrictions. Must be called before other threads exist, since other threads would not be
    /// restricted.
    ///
    /// # Errors
    /// Returns a clause that names the option and the reason, if an option is not available on this system. Serving
    /// without the restriction would break the promise of the option.
    #[cfg(target_os = "linux")]
    pub(crate) fn apply(self, checkpoints: Option<&Checkpoints>) -> Result<(), String> {
        if self.read_only {
            // Landlock rules need existing paths. If the directory cannot be created, there are no checkpoints.
            let directory = checkpoints.and_then(|checkpoints| checkpoints.make_directory().ok());
            files::confine(directory)
                .map_err(|reason| format!("--read-only is not available on this system: {reason}"))?;
        }
        if self.no_network {
            network::confine().map_err(|reason| format!("--no-network is not available on this system: {reason}"))?;
        }
        Ok(())
    }

    /// Returns an error if an option is set, since both options need Linux.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn apply(self, _: Option<&Checkpoints>) -> Result<(), String> {
        if self.read_only || self.no_network {
            return Err("--no-network and --read-only need Linux".to_owned());
        }
        Ok(())
    }
}
