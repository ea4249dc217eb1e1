use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pillarbox::admin::Limits;
use pillarbox::store::{
    ClaimEnd, ClaimRequest, Claims, Epoch, Fleet, Hello, InstanceId, Joined, LaneRef, LaneState, Page, PollRequest,
    RecoverRequest, Recovered, Report, Settlement, Store, StoreFeatures, Take, Wake,
};
use pillarbox::{ErrorKind, Event, Position, Result};

use crate::connection::{Link, MappedSession, PgConfig, Session};
use crate::doorbell::{Listener, announce};
use crate::error::{Db, DbError};
use crate::event_id::IdSalt;
use crate::leaves::Upkeep;
use crate::operator::premises;
use crate::ownership::{self, Membership, Role, session_name};
use crate::publish::store_limits;
use crate::queue::Claiming;
use crate::reader::Reader;
use crate::schema::Schema;
use crate::settle::settle;
use crate::{home, migrate, queue};

/// At least this long between two settlements, so that a lane's cursor is rewritten at most twenty times a second.
const SETTLE_INTERVAL: Duration = Duration::from_millis(50);

/// How long a relay keeps the connection for operators' work that is not used.
const DESK_KEPT: Duration = Duration::from_secs(5);

/// How long a session that was given up may take to end.
const FORMER_CLAIMER_MS: i64 = 500;

/// A scan's plan is the same whatever is asked for, and planning it again for many leaves costs more than reading a page.
const READER_SETUP: &str = sql!(session, "reader");

/// The delivery table grows faster than its statistics: a plan that was made while it was empty must still do for a hundred thousand
/// rows. All that is written is found by an index.
const WRITER_SETUP: &str = sql!(session, "writer");

/// As the writer's. A claim holds locks that settlements may wait for, so it takes less than a beat or does nothing; the next one then
/// does less at once.
const CLAIMER_SETUP: &str = sql!(session, "claimer");

/// A log in a PostgreSQL database. One value is one instance once it has joined; it may also only be operated on.
///
/// Dropping the value without [`leave`](Store::leave) is what a crash looks like to others: they take its lanes over.
pub struct PostgresStore {
    config: Arc<PgConfig>,
    reader: Link,
    writer: Link,
    /// Made with the first claim: a slow one keeps no settlement waiting.
    claimer: Link,
    desk: Link,
    /// What reading remembers; only with the reader's session.
    reading: tokio::sync::Mutex<Reader>,
    /// What claiming remembers; only with the claimer's session.
    claiming: tokio::sync::Mutex<Claiming>,
    member: Mutex<Option<Arc<Membership>>>,
    listener: tokio::sync::Mutex<Option<Listener>>,
    barriers: Arc<AtomicU64>,
    /// The salt of the log's ids; known once the log was looked at.
    id_salt: Arc<IdSalt>,
    pub(crate) upkeep: Upkeep,
    #[cfg(feature = "mutants")]
    lane_laboratory: Mutex<Option<crate::mutant::Laboratory>>,
}

impl PostgresStore {
    /// Opens the log at `postgres://…`. Its schema must be current ([`migrate`](crate::migrate()) makes it so), every premise
    /// must hold, and the log must be at home there.
    pub async fn open(url: &str) -> Result<Self> {
        Self::open_with(url.parse()?).await
    }

    /// As [`open`](PostgresStore::open), with what the URL means.
    pub async fn open_with(config: PgConfig) -> Result<Self> {
        let store = Self::unexamined(config);
        store.inspect().await?;
        Ok(store)
    }

    /// A log that was not looked at, not even whether it is there. For [`doctor`](pillarbox::admin::Operator::doctor) alone, which
    /// shows all that [`open`](PostgresStore::open) would refuse.
    pub fn unexamined(config: PgConfig) -> Self {
        let config = Arc::new(config);
        let reading = Reader::default();
        let (barriers, id_salt) = (reading.barriers.clone(), reading.decoder.id_salt.clone());
        PostgresStore {
            reader: Link::new(config.clone(), "pillarbox reader", READER_SETUP),
            writer: Link::new(config.clone(), "pillarbox writer", WRITER_SETUP),
            claimer: Link::new(config.clone(), "pillarbox claimer", CLAIMER_SETUP),
            desk: Link::new(config.clone(), "pillarbox operator", ""),
            reading: tokio::sync::Mutex::new(reading),
            claiming: tokio::sync::Mutex::default(),
            member: Mutex::new(None),
            listener: tokio::sync::Mutex::new(None),
            barriers,
            id_salt,
            upkeep: Upkeep::default(),
            #[cfg(feature = "mutants")]
            lane_laboratory: Mutex::new(None),
            config,
        }
    }

    /// Checks every premise that can be checked before anything is done.
    async fn inspect(&self) -> Db<()> {
        let mut session = self.desk().await?;
        migrate::require(&session).await?;
        premises::require(&session).await?;
        self.id_salt.look(&**session).await?;
        home::check(&mut session).await
    }

    /// Where the log is.
    pub fn config(&self) -> &PgConfig {
        &self.config
    }

    /// The log's schema, which the URL names, to publish into it and to accept by its inbox. The free functions, like
    /// [`publish`](crate::publish()), know `pillarbox` alone.
    pub fn schema(&self) -> Schema {
        Schema::of(&self.config)
    }

    /// How often what was read had to be made durable before it was returned.
    pub fn barriers(&self) -> u64 {
        self.barriers.load(Ordering::Relaxed)
    }

    /// Changes the log's limits for all publishers.
    pub async fn set_limits(&self, limits: Limits) -> Result<()> {
        Ok(self.store_limits(limits).await?)
    }

    async fn store_limits(&self, limits: Limits) -> Db<()> {
        let mut session = self.desk().await?;
        let tx = session.begin().await?;
        store_limits(&tx, &limits).await?;
        Ok(tx.commit().await?)
    }

    /// Breaks the store, or calls something between the steps of its polls.
    #[cfg(feature = "mutants")]
    pub async fn experiment(&self, mutant: Option<crate::Mutant>, hook: Option<crate::Hook>) {
        self.reading.lock().await.laboratory = Some(crate::mutant::Laboratory::new(mutant, hook));
    }

    /// Counts a writer as idle after another time than a minute.
    #[cfg(feature = "mutants")]
    pub async fn experiment_with_idle_writers(&self, margin: Duration) {
        self.reading.lock().await.idle_margin = margin;
    }

    /// Breaks how lanes are taken and settled, or calls something between the steps of that.
    #[cfg(feature = "mutants")]
    pub fn experiment_with_lanes(&self, mutant: Option<crate::Mutant>, hook: Option<crate::Hook>) {
        let laboratory = crate::mutant::Laboratory::new(mutant, hook);
        *self.lane_laboratory.lock().unwrap_or_else(PoisonError::into_inner) = Some(laboratory);
    }

    #[cfg(feature = "mutants")]
    fn lane_laboratory(&self) -> Option<crate::mutant::Laboratory> {
        self.lane_laboratory.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Breaks the doorbell of the instance that this is, or lets it wake with every ring and fall asleep after this time.
    #[cfg(feature = "mutants")]
    pub fn experiment_at_the_doorbell(&self, mutant: Option<crate::Mutant>, doze_after: Option<Duration>) {
        self.member().into_iter().for_each(|member| member.experiment(mutant, doze_after));
    }

    /// How often the doorbell of the instance that this is has fallen asleep.
    #[cfg(feature = "mutants")]
    pub fn sleeps(&self) -> usize {
        self.member().map_or(0, |member| member.sleeps())
    }

    /// The session for operators' work, which may be long and must not hold up a poll.
    pub(crate) async fn desk(&self) -> Db<MappedSession<'_>> {
        self.desk.session().await
    }

    fn member(&self) -> Option<Arc<Membership>> {
        self.member.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// This instance, which must have joined and not have ended.
    fn living(&self) -> Db<Arc<Membership>> {
        let member = self.member().ok_or_else(|| {
            DbError::own(ErrorKind::Fatal, "this store is not an instance; join before observing or taking lanes")
        })?;
        member.check()?;
        Ok(member)
    }

    /// Whatever was sent over a connection that was given up has been carried out after this, or never will be.
    async fn end_former_claimer(&self, claimer: &Session, member: &Membership) -> Db<()> {
        let name = session_name(&self.config, member.instance(), Role::Claimer);
        let statement = claimer.statement(sql!(instance, "end_session")).await?;
        for row in claimer.query(&statement, &[&name, &FORMER_CLAIMER_MS]).await? {
            if !row.try_get::<_, bool>(0)? {
                let message = "a former session of this relay has not ended; what it was claiming is not known yet";
                return Err(DbError::own(ErrorKind::Unavailable, message));
            }
        }
        Ok(())
    }

    /// Refuses to go on for an instance that has ended.
    fn check(&self) -> Db<()> {
        self.member().map_or(Ok(()), |member| member.check())
    }

    async fn join_fleet(&self, hello: Hello) -> Db<Joined> {
        self.reader.belongs_to_nobody().await;
        self.writer.belongs_to_nobody().await;
        self.claimer.belongs_to_nobody().await;
        {
            // Not the desk, which may be busy with something long.
            let mut session = Session::connect(&self.config, "pillarbox joining", None).await?;
            // Somebody may have changed the schema since this store was opened.
            migrate::require(&session).await?;
            home::check(&mut session).await?;
            // A log that was declared a copy has another one.
            self.id_salt.look(&*session).await?;
            if let Some(former) = self.member() {
                former.end();
                // The server may not have noticed yet that they were lost, and they may hold locks.
                ownership::end_sessions(&session, &[former.instance()]).await;
                give_up(&session, former.instance()).await?;
                announce(&*session, &format!("ended {}", former.instance().0)).await?;
            }
        }
        *self.member.lock().unwrap_or_else(PoisonError::into_inner) = None;
        // An instance that cannot work must not get lanes: what it works with is there before it is one.
        drop((self.reader.session().await?, self.writer.session().await?));
        let (member, joined) = Membership::join(&self.config, &hello).await?;
        self.desk.close_if_idle(Duration::ZERO);
        let links = [
            (&self.reader, Role::Reader),
            (&self.writer, Role::Writer),
            (&self.claimer, Role::Claimer),
            (&self.desk, Role::Operator),
        ];
        for (link, role) in links {
            link.belongs_to(joined.instance, session_name(&self.config, joined.instance, role)).await?;
        }
        *self.member.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(member));
        Ok(joined)
    }

    async fn read_page(&self, request: &PollRequest) -> Db<Page> {
        self.check()?;
        let session = self.reader.session().await?;
        let mut reading = self.reading.lock().await;
        let member = self.member();
        if let Some(member) = &member {
            member.poll_begins();
        }
        let page = reading.poll(&session, request).await?;
        if let Some(member) = &member {
            let events = page.scans.iter().map(|scan| scan.events.len()).sum();
            member.polled(page.horizon, page.writers.as_deref(), events);
        }
        Ok(page)
    }

    async fn listen(&self, timeout: Duration) -> Db<Wake> {
        if self.member().is_some() {
            return self.living()?.wait(timeout).await;
        }
        let mut listener = self.listener.lock().await;
        if listener.is_none() {
            *listener = Some(Listener::connect(&self.config).await?);
        }
        let listening = listener.as_mut().expect("made above");
        let woken = listening.wait(timeout).await;
        if woken.is_err() {
            *listener = None;
        }
        woken
    }
}

impl Store for PostgresStore {
    fn features(&self) -> StoreFeatures {
        StoreFeatures { lock_proves_life: false, settle_interval: SETTLE_INTERVAL }
    }

    async fn join(&self, hello: Hello) -> Result<Joined> {
        Ok(self.writer.bounded(self.join_fleet(hello)).await?)
    }

    async fn observe(&self, report: &Report) -> Result<Fleet> {
        self.desk.close_if_idle(DESK_KEPT);
        Ok(self.living()?.observe(report).await?)
    }

    async fn take(&self, lanes: &[Take]) -> Result<Vec<Option<Epoch>>> {
        let member = self.living()?;
        #[cfg(feature = "mutants")]
        if let Some(laboratory) = self.lane_laboratory() {
            laboratory.before_take(self, lanes).await?;
        }
        let take = async { member.take(&mut *self.writer.session().await?, lanes).await };
        Ok(self.writer.bounded(take).await?)
    }

    async fn load(&self, lanes: &[(LaneRef, Epoch)]) -> Result<Vec<Option<LaneState>>> {
        self.check()?;
        #[cfg(feature = "mutants")]
        if let Some(states) = self.lane_laboratory().and_then(|laboratory| laboratory.loaded()) {
            return Ok(states);
        }
        let load = async { ownership::load(&mut *self.reader.session().await?, lanes).await };
        Ok(self.reader.bounded(load).await?)
    }

    async fn poll(&self, request: &PollRequest) -> Result<Page> {
        Ok(self.reader.bounded(self.read_page(request)).await?)
    }

    async fn fetch(&self, positions: &[Position]) -> Result<Vec<Arc<Event>>> {
        self.check()?;
        let fetch = async {
            let session = self.reader.session().await?;
            self.reading.lock().await.fetch(&session, positions).await
        };
        Ok(self.reader.bounded(fetch).await?)
    }

    async fn settle(&self, settlement: &Settlement) -> Result<Vec<bool>> {
        self.check()?;
        let member = self.member();
        let me = member.as_deref().map(number);
        #[cfg(feature = "mutants")]
        if let Some(laboratory) = self.lane_laboratory() {
            return Ok(crate::mutant::settle(&*self.writer.session().await?, settlement, me, &laboratory).await?);
        }
        let settle = async { settle(&*self.writer.session().await?, settlement, me).await };
        let settled = self.writer.bounded(settle).await?;
        if let (true, Some(member)) = (settled.queued, member) {
            member.made_ready();
        }
        Ok(settled.answers)
    }

    async fn claim(&self, requests: &[ClaimRequest]) -> Result<Vec<Claims>> {
        let member = self.living()?;
        let claim = async {
            let session = self.claimer.session().await?;
            if requests.iter().any(|request| request.again) {
                self.end_former_claimer(&session, &member).await?;
            }
            self.claiming.lock().await.claim(&session, number(&member), requests).await
        };
        let answer = self.claimer.bounded(claim).await?;
        if !answer.alive {
            return Err(member.buried().into());
        }
        Ok(answer.claims)
    }

    async fn finish(&self, ends: &[ClaimEnd]) -> Result<Vec<bool>> {
        let member = self.living()?;
        let finish = async { queue::finish(&*self.writer.session().await?, number(&member), ends).await };
        let finished = self.writer.bounded(finish).await?;
        if finished.made_ready {
            member.made_ready();
        }
        Ok(finished.ended)
    }

    async fn recover(&self, request: &RecoverRequest) -> Result<Recovered> {
        let member = self.living()?;
        let recover = async { queue::recover(&mut *self.writer.session().await?, request).await };
        let recovered = self.writer.bounded(recover).await?;
        if !recovered.claims.is_empty() {
            member.made_ready();
        }
        Ok(recovered)
    }

    async fn wait(&self, timeout: Duration) -> Result<Wake> {
        Ok(self.listen(timeout).await?)
    }

    async fn leave(&self) -> Result<()> {
        let member = self.member.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(member) = member {
            member.leave().await?;
        }
        Ok(())
    }
}

/// An instance as the owner of claims.
fn number(member: &Membership) -> i32 {
    member.instance().0 as i32
}

/// Ends what this process was before: no other instance has to wait until it is found dead. One statement, which holds no lock while it waits for
/// this process.
async fn give_up(session: &Session, former: InstanceId) -> Db<()> {
    session.execute(sql!(instance, "give_up"), &[&(former.0 as i32)]).await?;
    Ok(())
}

impl std::fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresStore").field("config", &self.config).finish_non_exhaustive()
    }
}
