//! What a device holds and computes of the neurons, if there is one. Without one, or once it has
//! failed, it holds and computes nothing.

use std::sync::Arc;
use std::time::Duration;

use super::latch::Latch;
use super::layout::Layout;
use super::tier::{PassRows, StreamedFrom, Tier, TierSetup};
use crate::cluster::{CLUSTER, prefixes};
use crate::device::products::Products;
use crate::device::{
    DeviceError, NeuronRows, Part, ProductRoom, Room, Taken, Ticket, Widths, Work,
};
use crate::error::Error;
use crate::split::Product;

/// The device's side of a store.
pub(crate) struct DeviceSide {
    layout: Arc<Layout>,
    tier: Option<Tier>,
    /// What computes gates from resident rows.
    gates: Option<Arc<Products>>,
    latch: Arc<Latch>,
}

impl DeviceSide {
    /// Makes room for the hottest clusters; `wanted`: how many of each bank are to be hot.
    pub(super) fn new(
        layout: Arc<Layout>,
        setup: Option<TierSetup>,
        wanted: &[u32],
        latch: Arc<Latch>,
    ) -> Result<Self, Error> {
        let make = |setup: TierSetup| {
            let clusters = layout.clusters_of_each();
            let hot = wanted.iter().copied().map(u64::from).sum();
            let prefix = match setup.clusters <= hot {
                true => prefixes(setup.clusters, wanted, &clusters),
                // Somebody asked for more than is hot.
                false => prefixes(setup.clusters, &clusters, &clusters),
            };
            let neurons = |bank: u32, clusters: u32| {
                let last = layout.cluster_neurons(bank, clusters - 1);
                last.end as usize
            };
            Tier::new(setup, prefix, neurons)
        };
        Ok(Self {
            tier: setup.map(make).transpose()?,
            gates: None,
            latch,
            layout,
        })
    }

    /// Clusters of each bank that are its own; `None` without a device.
    pub(super) fn prefixes(&self) -> Option<&[u32]> {
        self.tier.as_ref().map(Tier::prefixes)
    }

    /// Finds the bytes that the CPU may read, once all are uploaded.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        self.tier.as_mut().map_or(Ok(()), Tier::settle)
    }

    /// Leaves gates to what computes them from resident rows.
    pub(super) fn set_gates(&mut self, gates: Option<Arc<Products>>) {
        self.gates = gates;
    }

    /// What computes gates from resident rows.
    pub(super) fn gates(&self) -> Option<&Arc<Products>> {
        self.gates.as_ref()
    }

    /// Begins a layer of a pass.
    pub(super) fn begin(&mut self, rows: PassRows) {
        if let Some(tier) = &mut self.tier {
            tier.begin(rows);
        }
    }

    /// Whether a cluster is to be uploaded.
    pub(super) fn lacks(&self, bank: u32, cluster: u32) -> bool {
        (self.tier.as_ref()).is_some_and(|tier| tier.lacks(bank, cluster))
    }

    /// Uploads a cluster.
    pub(super) fn upload(
        &mut self,
        bank: u32,
        cluster: u32,
        rows: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), Error> {
        let first = self.layout.cluster_neurons(bank, cluster).start as usize;
        match &mut self.tier {
            Some(tier) => tier.upload(bank, cluster, first, rows),
            None => Ok(()),
        }
    }

    /// The bytes of a bank's part that hold `cluster`, and its neurons, if the CPU may read them.
    pub(super) fn shared(&self, bank: u32, cluster: u32) -> Option<(&[u8], usize)> {
        self.tier.as_ref()?.shared(bank, cluster)
    }

    /// How many clusters of a bank, from the first on, it computes in this pass.
    pub fn computes(&self, bank: u32) -> usize {
        (self.tier.as_ref()).map_or(0, |tier| tier.clusters(bank) as usize)
    }

    /// How many of them it has for everybody.
    pub fn holds(&self, bank: u32) -> usize {
        (self.tier.as_ref()).map_or(0, |tier| tier.held(bank) as usize)
    }

    /// How many clusters of all banks it computes in a pass of `rows` rows.
    pub fn computed_for(&self, rows: usize) -> u64 {
        let of = |tier: &Tier| {
            let banks = 0..self.layout.banks() as u32;
            banks
                .map(|bank| u64::from(tier.clusters_for(bank, rows)))
                .sum()
        };
        self.tier.as_ref().map_or(0, of)
    }

    /// Has it compute clusters of a bank; see [`Tier::submit_streamed`].
    pub fn submit<'a>(
        &mut self,
        bank: u32,
        work: impl FnOnce(Part) -> Work<'a>,
    ) -> Result<Option<Ticket>, Error> {
        self.submit_streamed(StreamedFrom::Held(bank), work)
    }

    /// Has it compute rows of a pass with clusters that it holds or that were copied to a buffer;
    /// see [`Tier::submit_streamed`].
    pub fn submit_streamed<'a>(
        &mut self,
        from: StreamedFrom,
        work: impl FnOnce(Part) -> Work<'a>,
    ) -> Result<Option<Ticket>, Error> {
        let submitted = match &mut self.tier {
            Some(tier) => tier.submit_streamed(from, work),
            None => Ok(None),
        };
        self.latch.keep(submitted)
    }

    /// Waits for its sums; see [`Tier::take`].
    pub fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Option<Taken>, Error> {
        let taken = match &mut self.tier {
            Some(tier) => tier.take(ticket, out),
            None => Ok(None),
        };
        self.latch.keep(taken)
    }

    /// Whether it is done with some work; does not wait. `None` if it has failed.
    pub fn is_done(&mut self, ticket: Ticket) -> Result<Option<bool>, Error> {
        let done = match &mut self.tier {
            Some(tier) => tier.is_done(ticket),
            None => Ok(None),
        };
        self.latch.keep(done)
    }

    /// How many rows of a pass of `rows` rows it is to compute with all clusters of each layer.
    pub fn streamed_rows(&self, rows: usize) -> usize {
        (self.tier.as_ref()).map_or(0, |tier| tier.streamed_rows(rows))
    }

    /// Most clusters of a piece of such work.
    pub fn streamed_at_once(&self) -> usize {
        self.tier.as_ref().map_or(1, Tier::streamed_at_once)
    }

    /// Clusters that its buffers have room for.
    pub fn stream_clusters(&self) -> usize {
        self.tier.as_ref().map_or(0, Tier::stream_clusters)
    }

    /// Whether it computes some of the current layer's rows in this way, so that all neurons are
    /// needed.
    pub fn streams(&self) -> bool {
        self.tier.as_ref().is_some_and(Tier::streams)
    }

    /// Copies a cluster to its buffer `buffer`, as the `place`-th one there. False if it has failed.
    pub(super) fn upload_streamed(
        &mut self,
        buffer: usize,
        place: usize,
        rows: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<bool, Error> {
        let uploaded = match &mut self.tier {
            Some(tier) => tier.upload_streamed(buffer, place, rows),
            None => Ok(false),
        };
        self.latch.keep(uploaded)
    }

    /// Makes room for passes of other lengths.
    ///
    /// # Errors
    /// It has no memory for that; it is not used before there is room for others.
    pub fn set_room(
        &mut self,
        room: &Room,
        products: ProductRoom,
        widths: &Widths,
    ) -> Result<(), DeviceError> {
        let Some(tier) = self.tier.as_mut().filter(|tier| tier.lost().is_none()) else {
            return Ok(());
        };
        tier.set_room(room, widths.clone())?;
        tier.device().dense().make_product_room(&products)?;
        if let Some(held) = &self.gates {
            held.set_results(products.results);
        }
        Ok(())
    }

    /// Goes on without the device where it has failed.
    ///
    /// # Errors
    /// The failure, unless the CPU can go on.
    pub fn or_lost(&self, made: Result<(), DeviceError>) -> Result<(), Error> {
        match &self.tier {
            Some(tier) => tier.device().or_lost(made).map(|_| ()),
            None => Ok(made?),
        }
    }

    /// Time that its sums were waited for.
    pub fn waited(&self) -> Duration {
        self.tier.as_ref().map_or(Duration::ZERO, Tier::waited)
    }

    /// Share of the gates of a token that it computes from resident rows, and the time that was
    /// waited for it.
    pub fn gates_share(&self) -> (f64, Duration) {
        let Some(products) = &self.gates else {
            return (0.0, Duration::ZERO);
        };
        let banks = (0..self.layout.banks() as u32).map(|bank| {
            let all = self.layout.neurons(bank);
            let its = (self.tier.as_ref()).map_or(0, |tier| tier.clusters_for(bank, 1));
            let rows = all.saturating_sub(its as usize * CLUSTER);
            let (cols, n) = (self.layout.format.d, 1);
            [products.rows(Product { rows, cols, n }), all]
        });
        let [its, all] = banks.fold([0, 0], |sum, of| [sum[0] + of[0], sum[1] + of[1]]);
        (its as f64 / all.max(1) as f64, products.waited())
    }

    /// Why it is not used any longer, if so.
    pub fn lost(&self) -> Option<&DeviceError> {
        self.tier.as_ref()?.lost()
    }
}
