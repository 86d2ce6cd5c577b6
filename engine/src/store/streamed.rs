//! Clusters that pass through a device: from wherever their bytes are complete to one of its buffers.

use super::neurons::NeuronStore;
use super::tier::{StreamedFrom, Tier};
use crate::device::{DeviceError, NeuronRows, Part, ProductRoom, Room, Ticket, Widths, Work};
use crate::error::Error;

impl NeuronStore {
    /// How many rows of a pass of `rows` rows a device is to compute with all clusters of each layer.
    pub fn streamed_rows(&self, rows: usize) -> usize {
        let tier = self.tier.as_ref();
        tier.map_or(0, |tier| tier.streamed_rows(rows))
    }

    /// Makes room on a device for passes of other lengths.
    ///
    /// # Errors
    /// It has no memory for that; it is not used before there is room for others.
    pub fn set_device_room(
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
        if let Some(held) = &self.gate_products {
            held.set_results(products.results);
        }
        Ok(())
    }

    /// Goes on without the device where it has failed.
    ///
    /// # Errors
    /// The failure, unless the CPU can go on.
    pub fn device_or_lost(&self, made: Result<(), DeviceError>) -> Result<(), Error> {
        match &self.tier {
            Some(tier) => tier.device().or_lost(made).map(|_| ()),
            None => Ok(made?),
        }
    }

    /// Most clusters of a piece of such work.
    pub fn streamed_at_once(&self) -> usize {
        let tier = self.tier.as_ref();
        tier.map_or(1, Tier::streamed_at_once)
    }

    /// Clusters that its buffers have room for.
    pub fn stream_clusters(&self) -> usize {
        let tier = self.tier.as_ref();
        tier.map_or(0, Tier::stream_clusters)
    }

    /// Whether a device computes some of the current layer's rows in this way, so that all neurons are needed.
    pub fn streams_through_device(&self) -> bool {
        self.tier.as_ref().is_some_and(Tier::streams)
    }

    /// Copies a complete item to the device's buffer `buffer`, as the `place`-th cluster there. False if the device
    /// has failed.
    pub fn upload_streamed(
        &mut self,
        item: usize,
        buffer: usize,
        place: usize,
    ) -> Result<bool, Error> {
        let Some(mut tier) = self.tier.take() else {
            return Ok(false);
        };
        let bytes = self.cluster(item);
        let bank = self.layer.items[item].bank;
        let (format, resident) = (self.layout.format, &self.resident);
        let mut rows = bytes.ids().iter().enumerate().filter_map(|(i, &neuron)| {
            // What is damaged is reported below.
            let of = bytes.neuron(i)?;
            Some(NeuronRows {
                gate: match of.gate {
                    [] => resident.gate(bank, neuron)?,
                    gate => format.gate(gate, of.scales),
                },
                up: (!format.ungated).then(|| format.up(of.up, of.scales)),
                down: format.down(of.down, of.scales),
            })
        });
        let uploaded = tier.upload_streamed(buffer, place, &mut rows);
        drop(rows);
        self.tier = Some(tier);
        let uploaded = self.latch(uploaded)?;
        self.intact()?;
        Ok(uploaded)
    }

    /// Has the device compute such work; see [`Tier::submit`].
    pub fn submit_streamed<'a>(
        &mut self,
        from: StreamedFrom,
        work: impl FnOnce(Part) -> Work<'a>,
    ) -> Result<Option<Ticket>, Error> {
        let submitted = match &mut self.tier {
            Some(tier) => tier.submit_streamed(from, work),
            None => Ok(None),
        };
        self.latch(submitted)
    }

    /// Whether a device is done with some work; does not wait. `None` if it has failed.
    pub fn is_done(&mut self, ticket: Ticket) -> Result<Option<bool>, Error> {
        let done = match &mut self.tier {
            Some(tier) => tier.is_done(ticket),
            None => Ok(None),
        };
        self.latch(done)
    }
}
