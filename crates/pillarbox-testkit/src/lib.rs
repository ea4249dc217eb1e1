//! pillarbox-testkit
