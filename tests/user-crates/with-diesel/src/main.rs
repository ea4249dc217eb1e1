//! Publishes in a transaction of Diesel.
use diesel::sql_types::{Binary, Nullable, Text};
use diesel::{Connection, PgConnection, QueryableByName, RunQueryDsl, connection::SimpleConnection};
use pillarbox::NewEvent;
use pillarbox_postgres::{EventSql, Parameter};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut connection = PgConnection::establish(&std::env::var("DATABASE_URL")?)?;
    connection.batch_execute("create table if not exists orders (id text primary key, total integer)")?;

    let placed = NewEvent::new("orders", "order.placed").key("diesel").json_text(r#"{"total":42}"#);
    let id = connection.transaction(|connection| {
        connection.batch_execute("insert into orders values ('diesel', 42)")?;
        publish(connection, &placed)
    })?;
    println!("{id}");
    Ok(())
}

#[derive(QueryableByName)]
struct Published {
    #[diesel(sql_type = Text)]
    id: String,
}

fn publish(connection: &mut PgConnection, event: &NewEvent) -> Result<String, Box<dyn std::error::Error>> {
    let statement = event.to_sql()?;
    let mut query = diesel::sql_query(statement.sql).into_boxed();
    for parameter in statement.parameters {
        query = match parameter {
            Parameter::Text(text) => query.bind::<Nullable<Text>, _>(text),
            Parameter::Bytes(bytes) => query.bind::<Nullable<Binary>, _>(bytes),
        };
    }
    Ok(query.get_result::<Published>(connection)?.id)
}
