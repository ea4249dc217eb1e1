-- The columns that are missing or of another type.
select wanted.name, wanted.type, format_type(attribute.atttypid, null) as found
from unnest($2::text[], $3::text[]) with ordinality as wanted (name, type, place)
left join pg_attribute as attribute
    on attribute.attrelid = to_regclass($1::text) and attribute.attname = wanted.name and attribute.attnum > 0
where format_type(attribute.atttypid, null) is distinct from wanted.type
order by wanted.place
