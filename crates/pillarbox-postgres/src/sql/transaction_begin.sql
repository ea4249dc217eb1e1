-- For as long as the transaction lasts: how long a statement, and the handler between two, may take; and whose it is. First the server's process, for who has to cancel it.
select
    pg_backend_pid(),
    set_config('statement_timeout', $1, true),
    set_config('idle_in_transaction_session_timeout', $1, true),
    set_config('application_name', $2, true)
