-- Whether writes are taken here, and whether a table could be made in the schema.
select
    pg_is_in_recovery() as standby,
    coalesce(has_schema_privilege(to_regnamespace(coalesce($1::text, quote_ident(current_schema()))), 'create'), false)
        as create
