-- For as long as the transaction lasts: how long a statement, and the handler between two, may take; and whose it is.
select
    set_config('statement_timeout', $1, true),
    set_config('idle_in_transaction_session_timeout', $1, true),
    set_config('application_name', $2, true)
