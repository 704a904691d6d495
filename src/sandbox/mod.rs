//! What `--no-network` and `--read-only` take away from this process and all that it starts, for good.
//!
//! This is a seat belt, not a sandbox: it has no unsafe corners for honest code, but what may be asked of other
//! processes through Unix sockets, for one, is not limited.

#[cfg(target_os = "linux")]
mod files;
#[cfg(target_os = "linux")]
mod network;

use clap::Args;

use crate::recovery::checkpoint::store::Checkpoints;

/// What to take away.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct Confinement {
    /// Lisp and the programs it starts get no sockets but Unix ones (Linux).
    #[arg(long)]
    no_network: bool,
    /// Lisp and the programs it starts write no files but below the temporary directory, ASDF's cache and where
    /// checkpoints are (Linux).
    #[arg(long)]
    read_only: bool,
}

impl Confinement {
    /// Takes it away. Called before there are other threads, which would keep what they have.
    ///
    /// # Errors
    /// A sentence that names the option and says why this system cannot do it. Serving without would be a lie.
    #[cfg(target_os = "linux")]
    pub(crate) fn apply(self, checkpoints: Option<&Checkpoints>) -> Result<(), String> {
        if self.read_only {
            // What is not there cannot be allowed. If it cannot be made, there are none.
            let directory = checkpoints.and_then(|checkpoints| checkpoints.make_directory().ok());
            files::confine(directory).map_err(|reason| format!("--read-only is not possible here: {reason}"))?;
        }
        if self.no_network {
            network::confine().map_err(|reason| format!("--no-network is not possible here: {reason}"))?;
        }
        Ok(())
    }

    /// Says that this works on Linux only.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn apply(self, _: Option<&Checkpoints>) -> Result<(), String> {
        if self.read_only || self.no_network {
            return Err("--no-network and --read-only need Linux".to_owned());
        }
        Ok(())
    }
}
