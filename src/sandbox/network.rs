//! The `--no-network` option, which uses seccomp, since Landlock restricts only TCP.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

/// The bit that marks system calls of the x32 interface. A rule for a number without the bit does not match these calls.
#[cfg(target_arch = "x86_64")]
const X32_BIT: libc::c_long = 0x4000_0000;

/// Prevents this process, and the programs that it starts, from creating sockets other than Unix sockets and from
/// using io_uring. Returns the reason, worded as a clause, if the system cannot enforce the restriction.
pub(super) fn confine() -> Result<(), String> {
    let program = build_filter().map_err(|error| error.to_string())?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| format!("it needs seccomp ({error})"))
}

fn build_filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let unix = u64::from(libc::AF_UNIX.unsigned_abs());
    let is_other = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, unix)?;
    let other_family = vec![SeccompRule::new(vec![is_other])?];
    let refused = BTreeMap::from([
        (libc::SYS_socket, other_family.clone()),
        // io_uring can create sockets without a system call that the filter sees.
        (libc::SYS_io_uring_setup, Vec::new()),
        #[cfg(target_arch = "x86_64")]
        (X32_BIT | libc::SYS_socket, other_family),
        #[cfg(target_arch = "x86_64")]
        (X32_BIT | libc::SYS_io_uring_setup, Vec::new()),
    ]);
    let refusal = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(refused.into_iter().collect(), SeccompAction::Allow, refusal, architecture)?.try_into()
}
