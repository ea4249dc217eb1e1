use std::time::Duration;

use pillarbox::{Relay, RelayConfig};
use pillarbox_example_pipeline::{Chat, Client, PEOPLE, Sockets, Tally};
use pillarbox_testkit::postgres::{Database, Server};
use rusqlite::Connection;
use tempfile::TempDir;

/// No test takes as long as this.
const PATIENCE: Duration = Duration::from_secs(120);

/// A prepared database of a test's own, and the sockets of those who are told what happens in it.
pub(crate) struct Place {
    home: Home,
    pub(crate) sockets: Sockets,
}

enum Home {
    Sqlite(TempDir),
    Postgres(Database),
}

impl Place {
    pub(crate) async fn sqlite() -> Self {
        Place::prepared(Home::Sqlite(tempfile::tempdir().unwrap())).await
    }

    pub(crate) async fn postgres() -> Self {
        Place::prepared(Home::Postgres(Server::shared().create_database().unwrap())).await
    }

    async fn prepared(home: Home) -> Self {
        let place = Place { home, sockets: Sockets::default() };
        Chat::prepare(&place.database()).await.unwrap();
        place
    }

    /// A file or a URL.
    pub(crate) fn database(&self) -> String {
        match &self.home {
            Home::Sqlite(folder) => folder.path().join("chat.db").display().to_string(),
            Home::Postgres(database) => database.url().to_owned(),
        }
    }

    pub(crate) async fn pipeline(&self) -> Relay {
        self.pipeline_with(RelayConfig::default()).await
    }

    pub(crate) async fn pipeline_with(&self, config: RelayConfig) -> Relay {
        Chat::pipeline(&self.database(), &self.sockets, config).await.unwrap()
    }

    /// The sockets of these people, open.
    pub(crate) fn connect(&self, people: &[&str]) -> Vec<Client> {
        people.iter().map(|person| self.sockets.connect(person)).collect()
    }

    /// One number out of the database. The table `delivery` is Pillarbox's.
    pub(crate) fn number(&self, sql: &str) -> i64 {
        match &self.home {
            Home::Sqlite(_) => {
                let connection = Connection::open(self.database()).unwrap();
                connection.busy_timeout(PATIENCE).unwrap();
                let sql = sql.replace("from delivery", "from pillarbox_delivery");
                connection.query_row(&sql, [], |row| row.get(0)).unwrap()
            }
            Home::Postgres(database) => {
                let sql = sql.replace("from delivery", "from pillarbox.delivery");
                database.psql(&sql).unwrap().trim().parse().unwrap()
            }
        }
    }

    /// Lets the pipeline come to rest and checks that every effect of every stage is there once. Returns how many broadcasts came
    /// again and were not shown.
    pub(crate) async fn check_all_is_done_once(
        &self,
        relay: Relay,
        tally: &mut Tally,
        clients: &mut [Client],
    ) -> usize {
        patient("all is settled", relay.until_idle()).await.unwrap();
        patient("the relay has ended", relay.drain()).await.unwrap();
        self.sockets.close();
        for client in clients.iter_mut() {
            patient("all was read", tally.listen_to_the_end(client)).await;
        }
        assert_eq!(tally.problems(), Vec::<String>::new());
        let mentions = tally.expected() as i64;
        assert_eq!(self.number("select count(*) from mention"), mentions, "a mention was found twice");
        assert_eq!(self.number("select count(*) from activity"), mentions, "a mention was listed twice");
        assert_eq!(self.number("select count(*) from activity where broadcasts <> 1"), 0, "not told once");
        for person in PEOPLE {
            let last = format!("select coalesce(max(number), 0) from activity where person = '{person}'");
            let count = format!("select count(distinct number) from activity where person = '{person}'");
            assert_eq!(self.number(&last), self.number(&count), "the list of {person} has holes");
        }
        let counted = self.number("select cast(sum(messages) as bigint) from author");
        assert_eq!(counted, self.number("select count(*) from message"), "a message was not counted once");
        assert_eq!(self.number("select count(*) from delivery"), 0, "something is left in a queue");
        clients.iter().map(Client::repeated).sum()
    }
}

/// Notes what each is told, until all that is owed to them has arrived.
pub(crate) async fn listen(tally: &mut Tally, clients: &mut [Client]) {
    for client in clients {
        let what = format!("{} is told", client.person());
        patient(&what, tally.listen(client)).await;
    }
}

/// Waits, but not for ever.
pub(crate) async fn patient<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("never: {what}"))
}
