use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use pillarbox::NewEvent;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

pub(crate) const TOPIC: &str = "orders";

/// The body of a request.
#[derive(Debug, Deserialize)]
pub(crate) struct NewOrder {
    customer: String,
    cents: i64,
}

/// The event of an order, and the answer to whoever placed it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct OrderPlaced {
    pub(crate) order: i64,
    pub(crate) customer: String,
    pub(crate) cents: i64,
}

/// `POST /orders`: the order and its event are both there after the commit, or neither is.
pub(crate) async fn place(
    State(pool): State<PgPool>,
    Json(NewOrder { customer, cents }): Json<NewOrder>,
) -> Result<(StatusCode, Json<OrderPlaced>), Refused> {
    let mut transaction = pool.begin().await?;
    let insert = sqlx::query_scalar("insert into orders (customer, cents) values ($1, $2) returning id");
    let order: i64 = insert.bind(&customer).bind(cents).fetch_one(&mut *transaction).await?;
    let placed = OrderPlaced { order, customer, cents };
    let event = NewEvent::new(TOPIC, "order.placed").key(&placed.customer).json(&placed);
    pillarbox_postgres::publish(&mut *transaction, &event).await?;
    transaction.commit().await?;
    Ok((StatusCode::CREATED, Json(placed)))
}

/// Whatever went wrong, as an answer.
pub(crate) struct Refused(anyhow::Error);

impl<E: Into<anyhow::Error>> From<E> for Refused {
    fn from(error: E) -> Self {
        Refused(error.into())
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        eprintln!("an order was not placed: {:#}", self.0);
        (StatusCode::SERVICE_UNAVAILABLE, "the order was not placed; try again").into_response()
    }
}
