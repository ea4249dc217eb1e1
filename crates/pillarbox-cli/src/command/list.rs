use anyhow::Result;
use pillarbox::admin::{ListQuery, ListRow, Operator, State};

use super::Scope;
use crate::args::ListArgs;
use crate::exit::Exit;
use crate::output::dash;

/// Lists events, or deliveries if a subscription or a state is named.
pub(super) async fn run(scope: &Scope, args: ListArgs) -> Result<Exit> {
    let limit = args.limit as usize;
    let query = ListQuery {
        subscription: args.subscription,
        state: args.state,
        key: args.key,
        topic: args.topic,
        correlation_id: args.correlation_id,
        limit,
    };
    let rows = scope.open().await?.list(&query).await?;
    if scope.output.json {
        scope.output.json(&rows)?;
        return Ok(Exit::Done);
    }
    if query.subscription.is_some() || query.state.is_some() {
        let headings = [
            "POSITION",
            "ID",
            "TOPIC",
            "TYPE",
            "KEY",
            "SUBSCRIPTION",
            "STATE",
            "ATTEMPTS",
            "DUE",
            "OWNER",
            "SINCE",
            "ERROR",
        ];
        scope.output.table(&headings, rows.iter().map(delivery).collect())?;
    } else {
        scope.output.table(&["POSITION", "ID", "TOPIC", "TYPE", "KEY", "CREATED"], rows.iter().map(event).collect())?;
    }
    if rows.len() == limit {
        scope.output.say(format!("showing the first {limit}; use --limit N for more"));
    }
    Ok(Exit::Done)
}

fn event(row: &ListRow) -> Vec<String> {
    let mut cells = head(row);
    cells.push(row.created_at.to_string());
    cells
}

fn delivery(row: &ListRow) -> Vec<String> {
    let mut cells = head(row);
    cells.extend([
        dash(row.subscription.as_ref()),
        dash(row.state.map(State::name)),
        dash(row.attempts),
        // Nothing is tried again before an operator acts.
        dash(row.due_at.filter(|_| row.state != Some(State::Dead))),
        dash(row.claim.as_ref().map(|claim| claim.instance.0)),
        dash(row.claim.as_ref().map(|claim| claim.since)),
        dash(row.error.as_deref().map(|error| error.lines().next().unwrap_or_default())),
    ]);
    cells
}

fn head(row: &ListRow) -> Vec<String> {
    vec![row.position.to_string(), row.id.to_string(), row.topic.clone(), row.r#type.clone(), dash(row.key.as_ref())]
}
