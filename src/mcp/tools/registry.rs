//! The tools that a process offers to its clients, which may change while these are connected.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};

use super::ToolSet;
use crate::tool_names;

/// A recipient of changes.
pub(in crate::mcp) trait Listener: Send + Sync {
    /// Called after each change.
    fn tools_changed(&self);
}

/// The tools of a process. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Registry(Arc<Shared>);

struct Shared {
    tools: RwLock<ToolSet>,
    /// The number of changes so far.
    version: AtomicU64,
    /// True for tools that may change.
    changes: bool,
    listeners: Mutex<Vec<Weak<dyn Listener>>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("tools", &self.tools).field("version", &self.version).finish_non_exhaustive()
    }
}

impl Registry {
    /// Returns a registry of tools that stay as they are.
    pub(crate) fn fixed(tools: ToolSet) -> Self {
        Self::new(tools, false)
    }

    /// Returns a registry of tools that may change.
    pub(in crate::mcp) fn changing(tools: ToolSet) -> Self {
        Self::new(tools, true)
    }

    fn new(tools: ToolSet, changes: bool) -> Self {
        let shared =
            Shared { tools: RwLock::new(tools), version: AtomicU64::new(0), changes, listeners: Mutex::default() };
        Self(Arc::new(shared))
    }

    /// Returns true for tools that may change.
    pub(in crate::mcp) fn may_change(&self) -> bool {
        self.0.changes
    }

    /// Returns the number of changes so far.
    pub(in crate::mcp) fn version(&self) -> u64 {
        self.0.version.load(Ordering::Acquire)
    }

    /// Returns the tools that are offered now.
    pub(in crate::mcp) fn tools(&self) -> ToolSet {
        self.0.tools.read().clone()
    }

    /// Has all texts of this process name the tools of this registry only.
    pub(in crate::mcp) fn name_listed_tools(&self) {
        tool_names::set(self.tools().names());
    }

    /// Tells `listener` of changes, as long as it is there.
    pub(in crate::mcp) fn tell(&self, listener: Weak<dyn Listener>) {
        if self.0.changes {
            let mut listeners = self.0.listeners.lock();
            listeners.retain(|listener| listener.strong_count() > 0);
            listeners.push(listener);
        }
    }

    /// Offers these tools from now on.
    pub(in crate::mcp) fn set(&self, tools: ToolSet) {
        *self.0.tools.write() = tools;
        self.0.version.fetch_add(1, Ordering::AcqRel);
        self.name_listed_tools();
        let listeners: Vec<_> = self.0.listeners.lock().iter().filter_map(Weak::upgrade).collect();
        listeners.iter().for_each(|listener| listener.tools_changed());
    }
}
