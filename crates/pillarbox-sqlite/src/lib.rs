//! pillarbox-sqlite
