//! What fails inside a store, before it gets the words that a caller reads.

/// Declares `DbError` and `Db` for a store whose database reports errors of the type `$error`, which `$explain` turns into a kind and
/// words.
#[macro_export]
macro_rules! store_failure {
    ($database:ident($error:ty), $explain:path) => {
        /// A failure inside this crate, before it gets the words that a caller reads.
        #[derive(Debug)]
        pub(crate) enum DbError {
            /// The database or its client library reported it.
            $database($error),
            /// This crate reported it.
            Own($crate::Error),
        }

        /// The result of most functions inside this crate.
        pub(crate) type Db<T> = std::result::Result<T, DbError>;

        impl DbError {
            /// A failure with its own words.
            pub(crate) fn own(kind: $crate::ErrorKind, message: impl Into<String>) -> Self {
                DbError::Own($crate::Error::new(kind, message))
            }

            /// That the log was replaced by another state of it, with what to do.
            pub(crate) fn not_itself(what: &str) -> Self {
                DbError::Own($crate::store::not_itself(what))
            }
        }

        impl From<$error> for DbError {
            fn from(error: $error) -> Self {
                DbError::$database(error)
            }
        }

        impl From<$crate::Error> for DbError {
            fn from(error: $crate::Error) -> Self {
                DbError::Own(error)
            }
        }

        impl From<DbError> for $crate::Error {
            fn from(error: DbError) -> Self {
                match error {
                    DbError::Own(error) => error,
                    DbError::$database(error) => {
                        let (kind, message) = $explain(&error);
                        $crate::Error::with_source(kind, message, error)
                    }
                }
            }
        }
    };
}
