select sql
from sqlite_master
where sql is not null and name like 'pillarbox\_%' escape '\'
order by
    case type when 'table' then 1 when 'index' then 2 when 'view' then 3 else 4 end,
    name
