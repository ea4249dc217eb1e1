//! pillarbox-sinks
