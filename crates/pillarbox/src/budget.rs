use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How much of something is in use: events, or bytes. Each part that is in use is held by a [`Reservation`].
#[derive(Debug, Default)]
pub(crate) struct Budget {
    used: Arc<AtomicUsize>,
}

impl Budget {
    /// How much is in use.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes so much into use, until the reservation is dropped.
    pub(crate) fn reserve(&self, amount: usize) -> Reservation {
        let mut reservation = Reservation { amount: 0, used: Some(self.used.clone()) };
        reservation.grow(amount);
        reservation
    }
}

/// A part of a [`Budget`] that is in use. Dropping it gives the part back, so that no path can forget to.
#[derive(Debug, Default)]
pub(crate) struct Reservation {
    amount: usize,
    /// None: a reservation of no budget, for nothing.
    used: Option<Arc<AtomicUsize>>,
}

impl Reservation {
    /// How much it stands for.
    pub(crate) fn amount(&self) -> usize {
        self.amount
    }

    /// Takes so much more into use.
    pub(crate) fn grow(&mut self, amount: usize) {
        if let Some(used) = &self.used {
            used.fetch_add(amount, Ordering::Relaxed);
            self.amount += amount;
        }
    }

    /// Gives so much back.
    pub(crate) fn shrink(&mut self, amount: usize) {
        drop(self.split(amount));
    }

    /// A part of it, to be held by something else.
    pub(crate) fn split(&mut self, amount: usize) -> Reservation {
        assert!(amount <= self.amount, "no more is given away than is held");
        self.amount -= amount;
        Reservation { amount, used: self.used.clone() }
    }

    /// Adds another reservation of the same budget.
    pub(crate) fn merge(&mut self, mut other: Reservation) {
        self.amount += std::mem::take(&mut other.amount);
        if self.used.is_none() {
            self.used = other.used.take();
        }
    }

    /// Moves a part of it to another reservation of the same budget.
    pub(crate) fn move_to(&mut self, other: &mut Reservation, amount: usize) {
        assert!(amount <= self.amount, "no more is moved than is held");
        self.amount -= amount;
        other.amount += amount;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(used) = self.used.as_ref().filter(|_| self.amount > 0) {
            used.fetch_sub(self.amount, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_in_use_until_its_last_permit_is_dropped() {
        let budget = Budget::default();
        let mut reservation = budget.reserve(5);
        let mut part = reservation.split(2);
        assert_eq!((budget.used(), reservation.amount(), part.amount()), (5, 3, 2));
        drop(reservation);
        assert_eq!(budget.used(), 2);
        part.grow(4);
        part.shrink(1);
        assert_eq!(budget.used(), 5);
        let mut rest = budget.reserve(0);
        part.move_to(&mut rest, 3);
        drop(part);
        assert_eq!((budget.used(), rest.amount()), (3, 3));
        rest.merge(budget.reserve(1));
        assert_eq!((budget.used(), rest.amount()), (4, 4));
        drop(rest);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    #[should_panic(expected = "no more is given away than is held")]
    fn no_more_is_given_away_than_is_held() {
        Budget::default().reserve(1).split(2);
    }
}
