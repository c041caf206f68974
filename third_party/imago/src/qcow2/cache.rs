//! Provides functionality for the L2 and refblock caches.

use super::*;
use crate::async_lru_cache::AsyncLruCacheBackend;
use crate::io_buffers::IoBuffer;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::trace;

/// I/O back-end for the L2 table cache.
struct L2CacheBackend<S: Storage> {
    /// Qcow2 metadata file.
    file: Arc<S>,

    /// Qcow2 header.
    header: Arc<Header>,
}

/// I/O back-end for the refblock cache.
struct RefBlockCacheBackend<S: Storage> {
    /// Qcow2 metadata file.
    file: Arc<S>,

    /// Qcow2 header.
    header: Arc<Header>,
}

impl<S: Storage> L2CacheBackend<S> {
    /// Create a new `L2CacheBackend`.
    ///
    /// `file` is the qcow2 metadata (image) file.
    pub fn new(file: Arc<S>, header: Arc<Header>) -> Self {
        L2CacheBackend { file, header }
    }
}

#[maybe_async(AFIT)]
impl<S: Storage> AsyncLruCacheBackend for L2CacheBackend<S> {
    type Key = HostCluster;
    type Value = L2Table;

    async fn load(&self, l2_cluster: HostCluster) -> io::Result<L2Table> {
        trace!("Loading L2 table");

        L2Table::load(
            self.file.as_ref(),
            &self.header,
            l2_cluster,
            self.header.l2_entries(),
        )
        .await
    }

    async fn flush(&self, l2_cluster: HostCluster, l2_table: &L2Table) -> io::Result<()> {
        trace!("Flushing L2 table");
        l2_table
            .write_if_modified(self.file.as_ref(), l2_cluster)
            .await
    }

    fn must_flush(&self, l2_table: &L2Table) -> bool {
        l2_table.is_modified()
    }

    unsafe fn evict(&self, _l2_cluster: HostCluster, l2_table: L2Table) {
        trace!(
            "Evicting L2 table {}",
            l2_table.get_offset().unwrap_or(HostOffset(0))
        );
        l2_table.clear_modified();
    }
}

impl<S: Storage> RefBlockCacheBackend<S> {
    /// Create a new `RefBlockCacheBackend`.
    ///
    /// `file` is the qcow2 metadata (image) file.
    pub fn new(file: Arc<S>, header: Arc<Header>) -> Self {
        RefBlockCacheBackend { file, header }
    }
}

#[maybe_async(AFIT)]
impl<S: Storage> AsyncLruCacheBackend for RefBlockCacheBackend<S> {
    type Key = HostCluster;
    type Value = RefBlock;

    async fn load(&self, rb_cluster: HostCluster) -> io::Result<RefBlock> {
        RefBlock::load(self.file.as_ref(), &self.header, rb_cluster).await
    }

    async fn flush(&self, rb_cluster: HostCluster, refblock: &RefBlock) -> io::Result<()> {
        refblock
            .write_if_modified(self.file.as_ref(), rb_cluster)
            .await
    }

    unsafe fn evict(&self, _rb_cluster: HostCluster, refblock: RefBlock) {
        refblock.clear_modified();
    }
}

/// Number of bytes of L2 tables to write back together, i.e. after one barrier.
///
/// Copies of the tables are kept in memory until they are written.
const WRITEBACK_BATCH: usize = 16 << 20;

/// How often to write back all modified L2 tables in order to make room for another one.
///
/// Once is enough, unless all other tables are modified or in use by the time.
const EVICTION_ATTEMPTS: usize = 16;

/// Qcow2 metadata caches with flush-ordering coordination.
///
/// On disk, no pointer may ever refer to a cluster with refcount 0, or to a cluster whose data has
/// not been written, neither after this process has been killed nor after the whole system has
/// lost its power.  So there are two rules:
///
/// - Refcount increments (as well as new tables’ contents, and data) are written and synced before
///   the pointers to these clusters are written.  For L2 tables, that is done here (see
///   [`MetadataCaches::write_back_l2()`]); for the L1 table, the reftable, and the header by their
///   users, with [`MetadataCaches::settle_refcounts()`].
/// - Refcounts are decremented only once the pointers’ removal has been written and synced, so that
///   neither the refcount on disk is too low, nor the cluster is used for something else while the
///   old pointer still exists on disk.  Until then, clusters wait in the
///   [`ClustersToFreeList`](super::allocation::ClustersToFreeList).
///
/// Therefore, the refblock cache can be written at any time.
///
/// For an allocating write, an L2 table is held write-locked across its data I/O while its prepared
/// data mapping is uncommitted.  Thus, writing a table back to disk must never take the table’s
/// `writer_lock`, because the write may itself need to write back tables.
pub(super) struct MetadataCaches<S: Storage> {
    /// L2 table cache
    l2: AsyncLruCache<HostCluster, L2Table, L2CacheBackend<S>>,

    /// Refblock cache
    rb: AsyncLruCache<HostCluster, RefBlock, RefBlockCacheBackend<S>>,

    /// Qcow2 metadata file.
    file: Arc<S>,

    /// Number of L2 tables to write back together.
    l2_batch: usize,

    /// Serializes L2 table write-backs, so that the newest copy of a table is written last.
    ///
    /// Taken before the caches’ own locks.
    writeback_lock: Mutex<()>,

    /// Serializes syncs: One that begins before another has failed must not succeed after it.
    sync_lock: Mutex<()>,

    /// Set once something that others depend on may not have reached the disk.
    failed: AtomicBool,
}

/// Copy of an L2 table that is to be written.
///
/// Unless it was, the table remains modified.
pub(super) struct L2TableCopy {
    /// The table.
    table: Arc<L2Table>,

    /// Where to write the copy.
    offset: HostOffset,

    /// The copy.
    data: IoBuffer,

    /// Whether it has been written.
    written: bool,
}

impl Drop for L2TableCopy {
    fn drop(&mut self) {
        if !self.written {
            self.table.set_modified();
        }
    }
}

#[maybe_async]
impl<S: Storage> MetadataCaches<S> {
    /// Create metadata caches for the given file, with the given header.
    ///
    /// The L2 cache is going to hold `l2_entries` tables, the refblock cache will have
    /// `rb_entries` refcount blocks.
    pub fn new(file: &Arc<S>, header: &Arc<Header>, l2_entries: usize, rb_entries: usize) -> Self {
        let l2_backend = L2CacheBackend::new(Arc::clone(file), Arc::clone(header));
        let rb_backend = RefBlockCacheBackend::new(Arc::clone(file), Arc::clone(header));

        MetadataCaches {
            l2: AsyncLruCache::new(l2_backend, l2_entries),
            rb: AsyncLruCache::new(rb_backend, rb_entries),
            file: Arc::clone(file),
            l2_batch: cmp::max(WRITEBACK_BATCH / header.cluster_size(), 1),
            writeback_lock: Default::default(),
            sync_lock: Default::default(),
            failed: AtomicBool::new(false),
        }
    }

    /// Ensure that everything written so far survives a loss of power.
    ///
    /// Once this has failed, it always does: The system reports data that it could not write only
    /// once, so a later sync may succeed although it is still not on the disk.
    pub async fn barrier(&self) -> io::Result<()> {
        let _lock = self.sync_lock.lock().await;
        if self.failed.load(Ordering::Relaxed) {
            return Err(io::Error::other(
                "An earlier write did not reach the disk; the image must be reopened",
            ));
        }

        let result = self.file.sync().await;
        if result.is_err() {
            self.set_failed();
        }
        result
    }

    /// Let no [`MetadataCaches::barrier()`] succeed anymore.
    ///
    /// For when metadata in memory and on disk may differ in a way that no later flush will mend.
    pub fn set_failed(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Ensure all refcounts survive a loss of power, as well as everything else written so far.
    ///
    /// Use before writing a pointer to newly allocated clusters.
    pub async fn settle_refcounts(&self) -> io::Result<()> {
        self.rb.flush().await?;
        self.barrier().await
    }

    /// Flush both L2 and refblock cache to disk.
    pub async fn flush_all(&self) -> io::Result<()> {
        self.write_back_l2().await?;
        self.rb.flush().await
    }

    /// Write all modified L2 tables back to disk, after the refcounts that they depend on.
    ///
    /// Tables may be modified while this runs, including by mappings to clusters whose refcounts
    /// are not on disk yet.  So this copies them first, then settles the refcounts, which were
    /// incremented before the copied pointers were entered, and writes the copies.
    async fn write_back_l2(&self) -> io::Result<()> {
        let _lock = self.writeback_lock.lock().await;

        for tables in self.l2.unflushed().await.chunks(self.l2_batch) {
            let mut copies = Vec::new();
            for table in tables {
                copies.extend(Self::copy_modified(table, self.file.mem_align())?);
            }
            if copies.is_empty() {
                continue;
            }

            self.settle_refcounts().await?;
            for copy in copies.iter_mut() {
                self.file.write(&copy.data, copy.offset.0).await?;
                copy.written = true;
            }
        }

        Ok(())
    }

    /// Copy an L2 table if it has been modified since it was last written.
    fn copy_modified(table: &Arc<L2Table>, mem_align: usize) -> io::Result<Option<L2TableCopy>> {
        if !table.is_modified() {
            return Ok(None);
        }
        let offset = table
            .get_offset()
            .ok_or_else(|| io::Error::other("L2 table does not have a cluster"))?;

        // Modifications after this point mark the table again
        table.clear_modified();
        match table.to_buffer(mem_align) {
            Ok(data) => Ok(Some(L2TableCopy {
                table: Arc::clone(table),
                offset,
                data,
                written: false,
            })),
            Err(err) => {
                table.set_modified();
                Err(err)
            }
        }
    }

    /// Retrieve an L2 table from the cache.
    ///
    /// See [`AsyncLruCache::get_or_insert()`] for details.
    pub async fn l2_get_or_insert(&self, cluster_index: HostCluster) -> io::Result<Arc<L2Table>> {
        for _ in 0..EVICTION_ATTEMPTS {
            if let Some(l2) = self.l2.get_or_insert(cluster_index, false).await? {
                return Ok(l2);
            }
            self.write_back_l2().await?;
        }

        Err(io::Error::other(
            "Cannot evict an L2 table; everything is in use",
        ))
    }

    /// Force-insert an L2 table.
    ///
    /// The L2 table must have a cluster associated with it ([`L2Table::set_cluster()`]).
    ///
    /// See [`AsyncLruCache::insert()`] for details.
    pub async fn l2_insert(&self, table: Arc<L2Table>) -> io::Result<()> {
        let cluster = table
            .get_cluster()
            .ok_or_else(|| io::Error::other("L2 table does not have a cluster"))?;
        for _ in 0..EVICTION_ATTEMPTS {
            if self.l2.insert(cluster, Arc::clone(&table), false).await? {
                return Ok(());
            }
            self.write_back_l2().await?;
        }

        Err(io::Error::other(
            "Cannot evict an L2 table; everything is in use",
        ))
    }

    /// Invalidate the L2 cache.
    ///
    /// # Safety
    /// May cause image corruption, you must guarantee the on-disk state is consistent.
    pub async unsafe fn invalidate_l2(&self) -> io::Result<()> {
        unsafe { self.l2.invalidate() }.await
    }

    /// Retrieve a refblock from the cache.
    ///
    /// See [`AsyncLruCache::get_or_insert()`] for details.
    pub async fn rb_get_or_insert(&self, cluster_index: HostCluster) -> io::Result<Arc<RefBlock>> {
        // `unwrap()` is safe: Will never return `Ok(None)` with `may_flush` set to true.
        let rb = self.rb.get_or_insert(cluster_index, true).await?.unwrap();
        Ok(rb)
    }

    /// Force-insert a refblock.
    ///
    /// The refblock must have a cluster associated with it ([`RefBlock::set_cluster()`]).
    ///
    /// See [`AsyncLruCache::insert()`] for details.
    pub async fn rb_insert(&self, rb: Arc<RefBlock>) -> io::Result<()> {
        let cluster = rb
            .get_cluster()
            .ok_or_else(|| io::Error::other("Refblock does not have a cluster"))?;
        let inserted = self.rb.insert(cluster, rb, true).await?;
        // Will always insert with `may_flush` set to true.
        assert!(inserted);

        Ok(())
    }

    /// Flush the refblock cache to disk.
    pub async fn flush_rb(&self) -> io::Result<()> {
        self.rb.flush().await
    }

    /// Invalidate the refblock cache.
    ///
    /// # Safety
    /// May cause image corruption, you must guarantee the on-disk state is consistent.
    pub async unsafe fn invalidate_rb(&self) -> io::Result<()> {
        unsafe { self.rb.invalidate() }.await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::null::Null;

    #[cfg(feature = "sync")]
    fn block_on<T>(v: T) -> T {
        v
    }

    #[cfg(feature = "async")]
    fn block_on<F: std::future::Future>(f: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(f)
    }

    /// Cross-cache eviction must not deadlock.
    ///
    /// Fill both caches to capacity.  Two threads concurrently trigger
    /// eviction on each cache.  L2 tables are written back before
    /// map.write(), so no cross-cache lock nesting occurs.
    #[test]
    fn test_cross_cache_eviction_no_deadlock() {
        use std::thread;

        let null = Arc::new(Null::new(1 << 20));
        let header = Arc::new(Header::new(16, 1, None, None, None));
        let caches = Arc::new(MetadataCaches::new(&null, &header, 1, 1));

        // Create entries with cluster set and modified cleared so
        // flush is a no-op (avoids needing real I/O on Null storage).
        let mut l2_entry = L2Table::new_cleared(&header);
        l2_entry.set_cluster(HostCluster(0));
        l2_entry.clear_modified();
        let mut rb_entry = RefBlock::new_cleared(null.as_ref(), &header).unwrap();
        rb_entry.set_cluster(HostCluster(0));
        rb_entry.clear_modified();

        block_on(caches.l2_insert(Arc::new(l2_entry))).unwrap();
        block_on(caches.rb_insert(Arc::new(rb_entry))).unwrap();

        let c1 = Arc::clone(&caches);
        let c2 = Arc::clone(&caches);

        let barrier = Arc::new(std::sync::Barrier::new(2));
        let bar1 = Arc::clone(&barrier);
        let bar2 = Arc::clone(&barrier);

        // Thread 1: insert new l2 entry (evicts old one, dep-flushes rb)
        let header1 = Arc::clone(&header);
        let t1 = thread::spawn(move || {
            let mut entry = L2Table::new_cleared(&header1);
            entry.set_cluster(HostCluster(1));
            entry.clear_modified();
            bar1.wait();
            block_on(c1.l2_insert(Arc::new(entry))).unwrap();
        });

        // Thread 2: insert new rb entry (evicts old one)
        let header2 = Arc::clone(&header);
        let null2 = Arc::new(Null::new(1 << 20));
        let t2 = thread::spawn(move || {
            let mut entry = RefBlock::new_cleared(null2.as_ref(), &header2).unwrap();
            entry.set_cluster(HostCluster(1));
            entry.clear_modified();
            bar2.wait();
            block_on(c2.rb_insert(Arc::new(entry))).unwrap();
        });

        t1.join().unwrap();
        t2.join().unwrap();
    }

    /// Refblocks must be flushed before an L2 table is evicted.
    ///
    /// Inserting into a full l2 cache must flush rb (the dependency)
    /// before evicting a modified l2 entry.
    #[maybe_async::test(feature = "sync", async(feature = "async", tokio::test))]
    async fn test_dep_flushed_before_eviction() {
        let null = Arc::new(Null::new(1 << 20));
        let header = Arc::new(Header::new(16, 1, None, None, None));
        let caches = MetadataCaches::new(&null, &header, 1, 16);

        // Insert a dirty rb entry
        let mut rb_entry = RefBlock::new_cleared(null.as_ref(), &header).unwrap();
        rb_entry.set_cluster(HostCluster(0));
        let rb_arc = Arc::new(rb_entry);
        caches.rb_insert(Arc::clone(&rb_arc)).await.unwrap();

        // Fill l2 cache (size 1)
        let mut l2_entry = L2Table::new_cleared(&header);
        l2_entry.set_cluster(HostCluster(0));
        caches.l2_insert(Arc::new(l2_entry)).await.unwrap();

        // Insert another l2 entry — triggers eviction.
        // The coordinator must flush rb (dep) before the l2 eviction.
        let mut l2_entry2 = L2Table::new_cleared(&header);
        l2_entry2.set_cluster(HostCluster(1));
        l2_entry2.clear_modified();
        caches.l2_insert(Arc::new(l2_entry2)).await.unwrap();

        // rb must have been flushed by the dep flush
        assert!(
            !rb_arc.is_modified(),
            "rb entry must be flushed before l2 eviction"
        );
    }
}
