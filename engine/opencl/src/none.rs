//! Where no OpenCL library can be loaded.

use crate::{Block, Error, HostBytes, Listed, MatrixSpec, Room, Spec, Taken, Work};

/// The devices of this machine: none.
pub fn list() -> Vec<Listed> {
    Vec::new()
}

/// No device is ever open.
pub struct Device {
    never: std::convert::Infallible,
}

impl Device {
    /// Fails.
    ///
    /// # Errors
    /// Always.
    pub fn open(_number: usize) -> Result<Self, Error> {
        Err(Error("this program was built without OpenCL".into()))
    }

    /// What it is.
    pub fn facts(&self) -> &Listed {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn prepare(&mut self, _spec: &Spec) -> Result<(), Error> {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn make_room(&mut self, _room: &Room) -> Result<(), Error> {
        match self.never {}
    }

    /// See the other implementation.
    pub fn clear(&mut self) {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn reserve(&mut self, _len: usize) -> Result<usize, Error> {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn write(&mut self, _part: usize, _at: usize, _bytes: &[u8]) -> Result<(), Error> {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn submit(&mut self, _work: &Work<'_>) -> Result<(), Error> {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn is_done(&self) -> Result<bool, Error> {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn take(&mut self, _out: &mut [f32]) -> Result<Taken, Error> {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn prepare_products(&mut self, _spec: &MatrixSpec) -> Result<(), Error> {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn share(&mut self, _spec: &MatrixSpec, _bytes: HostBytes) -> Result<usize, Error> {
        match self.never {}
    }

    /// See the other implementation.
    pub fn give_back(&mut self, _matrix: usize) {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn make_product_room(&mut self, _x: usize, _y: usize) -> Result<(), Error> {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn multiply(&mut self, _blocks: &[Block], _tokens: usize, _x: &[u8]) -> Result<(), Error> {
        match self.never {}
    }

    /// See the other implementation.
    ///
    /// # Errors
    /// Never: there is no device.
    pub fn take_products(&mut self, _out: &mut [f32]) -> Result<u64, Error> {
        match self.never {}
    }
}
