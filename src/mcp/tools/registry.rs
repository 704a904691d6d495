//! The tools that a process offers. The tools may change while clients are connected.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};

use super::ToolSet;
use crate::tool_names;

/// An observer of changes to the list of tools.
pub(in crate::mcp) trait ToolListObserver: Send + Sync {
    /// Handles a change of the list. The registry calls this function after each change.
    fn tools_changed(&self);
}

/// The tools that a process offers. Clones share the tools.
#[derive(Debug, Clone)]
pub(crate) struct Registry(Arc<RegistryState>);

struct RegistryState {
    tools: RwLock<ToolSet>,
    /// Number of changes so far.
    version: AtomicU64,
    /// True if the tools may change.
    may_change: bool,
    observers: Mutex<Vec<Weak<dyn ToolListObserver>>>,
}

impl fmt::Debug for RegistryState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegistryState")
            .field("tools", &self.tools)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Registry {
    /// Returns a registry whose tools never change.
    pub(crate) fn fixed(tools: ToolSet) -> Self {
        Self::new(tools, false)
    }

    /// Returns a registry whose tools may change.
    pub(in crate::mcp) fn changing(tools: ToolSet) -> Self {
        Self::new(tools, true)
    }

    fn new(tools: ToolSet, may_change: bool) -> Self {
        let shared = RegistryState {
            tools: RwLock::new(tools),
            version: AtomicU64::new(0),
            may_change,
            observers: Mutex::default(),
        };
        Self(Arc::new(shared))
    }

    /// Returns true if the tools may change.
    pub(in crate::mcp) fn may_change(&self) -> bool {
        self.0.may_change
    }

    /// Returns the number of changes so far.
    pub(in crate::mcp) fn version(&self) -> u64 {
        self.0.version.load(Ordering::Acquire)
    }

    /// Returns the current tools.
    pub(in crate::mcp) fn tools(&self) -> ToolSet {
        self.0.tools.read().clone()
    }

    /// Makes all texts of this process name only the tools of this registry.
    pub(in crate::mcp) fn publish_tool_names(&self) {
        tool_names::set_listed_tools(self.tools().names());
    }

    /// Registers `observer`, which is notified of changes until it is dropped.
    pub(in crate::mcp) fn subscribe(&self, observer: Weak<dyn ToolListObserver>) {
        if self.0.may_change {
            let mut observers = self.0.observers.lock();
            observers.retain(|observer| observer.strong_count() > 0);
            observers.push(observer);
        }
    }

    /// Replaces the tools and notifies the observers.
    pub(in crate::mcp) fn set(&self, tools: ToolSet) {
        *self.0.tools.write() = tools;
        self.0.version.fetch_add(1, Ordering::AcqRel);
        self.publish_tool_names();
        let observers: Vec<_> = self.0.observers.lock().iter().filter_map(Weak::upgrade).collect();
        observers.iter().for_each(|observer| observer.tools_changed());
    }
}
