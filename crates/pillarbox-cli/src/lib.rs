//! pillarbox-cli
