// SPDX-License-Identifier: GPL-2.0-only
/*
 * Driver for channels between virtual machines on Parador: /dev/parador-com*.
 *
 * The device is described in docs/spec/channel.md of Parador. This driver has messages, waiting,
 * the free area of the channel's memory, and shares: memory of a program that the peer may see,
 * and the peer's in a program.
 *
 * The peer is not trusted. It can write everything in the shared memory at any time, so
 * - indices of this side are kept in struct end and never read back, except when a ring is
 * (re)started;
 * - the peer's index is read once for each operation and checked, an entry is copied before it is
 * looked at;
 * - a ring with impossible indices or lengths gives EIO once and is reset, as the specification
 * demands;
 * - programs map the free area and shares only, never the rings;
 * - the peer can write to memory that is offered to it as long as that is pinned, so it is
 * unpinned only after the
 *   device has taken it back;
 * - a share that the peer takes back disappears from programs: an access is SIGBUS, whatever is
 * offered there next;
 * - so does everything that programs have mapped when the driver lets go of the device, which may
 * get another one then.
 *
 * A sleeper sets the ring's word `want`, and only the interrupt clears it before it wakes all
 * sleepers: so it does not matter how many wait, by which call. Barriers are those for other
 * machines (virt_*): a kernel that runs on one CPU drops the others.
 */
#ifdef CONFIG_X86
#include <asm/cpufeature.h>
#endif
#include <linux/atomic.h>
#include <linux/fs.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/of.h>
#include <linux/pci.h>
#include <linux/platform_device.h>
#include <linux/poll.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/uaccess.h>
#include <linux/version.h>
#include <linux/wait.h>

#include "parador_com.h"

#define VENDOR 0x5052
#define DEVICE 0x0001

#define REGISTERS 0		/* BARs */
#define MEMORY 2
#define WINDOW 4		/* of the peer's shares */

enum reg {
	REG_MAGIC = 0x00,
	REG_VERSION = 0x04,
	REG_SIDE = 0x08,
	REG_NUMBER = 0x0c,
	REG_OWN_ID = 0x10,
	REG_PEER_ID = 0x14,
	REG_SIZE = 0x18,
	REG_FLAGS = 0x1c,
	REG_PEER = 0x20,
	REG_EVENTS = 0x24,
	REG_DOORBELL = 0x28,
	REG_OWN_NAME = 0x40,
	REG_PEER_NAME = 0x60,
	REG_OWN_SHARES = 0x100,
	REG_PEER_SHARES = 0x200,
};

/* Registers of a share, and the distance to the next one's. */
enum share_reg {
	SHARE_ADDRESS = 0x00,
	SHARE_ADDRESS_HIGH = 0x04,
	SHARE_LENGTH = 0x08,
	SHARE_COMMAND = 0x0c,
	SHARE_STATE = 0x10,
	SHARE_RESULT = 0x14,
	SHARE_STEP = 0x20,
};

#define COMMAND_CLOSE 0		/* own: revoke; peer's: let go */
#define COMMAND_OPEN 1		/* own: offer; peer's: map */
#define COMMAND_WRITE 2		/* own: offer also to write */
#define STATE_WRITABLE 0x100

#define MAGIC 0x4e414843
#define VERSION 1
#define FLAG_DOORBELL 1

/* The channel's memory. */
#define WORDS(ring) (0x100 * (ring))
#define ENTRIES(ring) (0x1000 * (1 + (ring)))
#define AREA 0x3000
#define LENGTH 64		/* entries of a ring */

/* Offsets of the words of a ring. */
#define TAIL 0x00
#define HEAD 0x40
#define WANT_MESSAGES 0x80
#define WANT_ROOM 0xc0

#define HYPERCALL_DOORBELL 0x504152410001ULL

/* One of the two ends of a ring. */
struct end {
	spinlock_t lock;	/* of index, and of the order of messages */
	u32 index;		/* ours: tail of the sender, head of the receiver */
	u32 *own;		/* where ours is published */
	u32 *peers;
	u32 *own_want;
	u32 *peers_want;
	struct parador_com_message *entries;
	wait_queue_head_t waiting;
};

/* Memory of a program that the peer may map. */
struct offered {
	struct file *owner;	/* ends with it */
	struct mm_struct *mm;	/* whose locked memory it counts as */
	bool writable;
	unsigned int count;
	struct page *pages[];
};

/* The free area, where a share's number is expected. */
#define FREE_AREA PARADOR_COM_SHARES
#define MAPPABLE (PARADOR_COM_SHARES + 1)

/* A share of the peer, or the free area, in a program: all areas that have come of one mmap. */
struct mapping {
	struct list_head list;	/* of what is mapped; empty: that has been taken back */
	struct channel *channel;
	unsigned int share;	/* or FREE_AREA */
	unsigned int areas;
	struct address_space *space;
};

struct channel {
	struct kref references;	/* the driver's, and one for each open file */
	struct miscdevice misc;
	char name[24];
	u8 __iomem *registers;
	int irqs[2];		/* the doorbell, and events */
	u32 number;
	u32 flags;
	u64 area;		/* bytes */
	phys_addr_t area_base;
	phys_addr_t window_base;
	bool gone;		/* the device was removed; guarded by all three locks */
	struct end send;
	struct end receive;
	/*
	 * Of the registers of shares, and what follows. Taken within mmap_lock, so no user memory
	 * is touched under it.
	 */
	struct mutex shares;
	struct offered *offered[PARADOR_COM_SHARES];
	struct list_head mappings[MAPPABLE];
	atomic_t changes;	/* events so far */
};

/* An open file. */
struct opened {
	struct channel *channel;
	int seen;		/* value of changes when it looked */
};

static struct channel *channel_of(struct file *file)
{
	struct opened *opened = file->private_data;

	return opened->channel;
}

/*
 * ---- rings
 * ------------------------------------------------------------------------------------------------
 */

/* Rings a doorbell. 1: the peer does not run. Values above: the hypercall does not exist. */
static u64 doorbell_hypercall(u64 number)
{
#ifdef CONFIG_X86
	u64 result = HYPERCALL_DOORBELL;

	if (boot_cpu_has(X86_FEATURE_VMMCALL))
		asm volatile("vmmcall" : "+a"(result) : "b"(number) : "memory");
	return result;
#else
	register u64 result asm("x0") = HYPERCALL_DOORBELL;
	register u64 argument asm("x1") = number;

	asm volatile("hvc #0" : "+r"(result), "+r"(argument) : : "x2", "x3", "memory");
	return result;
#endif
}

static void ring_doorbell(struct channel *channel)
{
	if (!(channel->flags & FLAG_DOORBELL))
		return;
	if (doorbell_hypercall(channel->number) > 1)
		writel(1, channel->registers + REG_DOORBELL);
}

/* Messages in the ring, as seen by one end; more than LENGTH: the peer breaks the protocol. */
static u32 filled(struct end *end, bool sender)
{
	u32 peers = virt_load_acquire(end->peers);

	return sender ? end->index - peers : peers - end->index;
}

/*
 * Makes a ring empty, or takes it over as a former driver left it. With the end's lock, or before
 * there are users.
 */
static void start(struct end *end, bool sender)
{
	end->index = READ_ONCE(*end->own);
	if (filled(end, sender) > LENGTH) {
		end->index = READ_ONCE(*end->peers);
		virt_store_release(end->own, end->index);
	}
}

/* Puts a message into the ring: -EAGAIN if there is no room. */
static int put(struct channel *channel, const struct parador_com_message *message)
{
	struct end *end = &channel->send;
	int error = 0;
	u32 count;

	spin_lock(&end->lock);
	count = channel->gone ? 0 : filled(end, true);
	if (channel->gone) {
		error = -ENODEV;
	} else if (count > LENGTH) {
		start(end, true);
		error = -EIO;
	} else if (count == LENGTH) {
		error = -EAGAIN;
	} else {
		end->entries[end->index % LENGTH] = *message;
		end->index++;
		virt_store_release(end->own, end->index);
		virt_mb();
		if (READ_ONCE(*end->peers_want))
			ring_doorbell(channel);
	}
	spin_unlock(&end->lock);
	return error;
}

/*
 * Takes a message out of the ring: -EAGAIN if there is none, -EMSGSIZE if it has more than room
 * bytes.
 */
static int take(struct channel *channel, struct parador_com_message *message, size_t room)
{
	struct end *end = &channel->receive;
	int error = 0;
	u32 count;

	spin_lock(&end->lock);
	count = channel->gone ? 0 : filled(end, false);
	if (channel->gone) {
		error = -ENODEV;
		goto out;
	}
	if (count == 0) {
		error = -EAGAIN;
		goto out;
	}
	if (count <= LENGTH)
		memcpy(message, &end->entries[end->index % LENGTH], sizeof(*message));
	/* What was copied is looked at, not what is in the ring by now. */
	barrier();
	if (count > LENGTH || message->length > PARADOR_COM_PAYLOAD) {
		/* Nothing in it can be trusted: it is made empty. */
		end->index = READ_ONCE(*end->peers);
		virt_store_release(end->own, end->index);
		error = -EIO;
		goto out;
	}
	if (message->length > room) {
		error = -EMSGSIZE;
		goto out;
	}
	end->index++;
	virt_store_release(end->own, end->index);
	virt_mb();
	if (READ_ONCE(*end->peers_want))
		ring_doorbell(channel);
out:
	spin_unlock(&end->lock);
	return error;
}

/*
 * Whether the next put or take would not give -EAGAIN. Asks for a doorbell first, so a change
 * after it is not missed.
 */
static bool ready(struct channel *channel, bool sender)
{
	struct end *end = sender ? &channel->send : &channel->receive;
	bool result = true;

	spin_lock(&end->lock);
	if (!channel->gone) {
		WRITE_ONCE(*end->own_want, 1);
		virt_mb();
		result = filled(end, sender) != (sender ? LENGTH : 0);
	}
	spin_unlock(&end->lock);
	return result;
}

static bool peer_runs(struct channel *channel)
{
	bool result;

	spin_lock(&channel->send.lock);
	result = !channel->gone && readl(channel->registers + REG_PEER) == 1;
	spin_unlock(&channel->send.lock);
	return result;
}

/* Waits until an end is ready. Without a doorbell it looks every 10 ms. */
static int wait_for(struct channel *channel, bool sender)
{
	struct end *end = sender ? &channel->send : &channel->receive;
	long left;

	if (channel->flags & FLAG_DOORBELL)
		return wait_event_interruptible(end->waiting, ready(channel, sender) ||
						(sender && !peer_runs(channel)));
	left = wait_event_interruptible_timeout(end->waiting, ready(channel, sender),
						msecs_to_jiffies(10));
	return left < 0 ? left : 0;
}

static int send(struct file *file, const struct parador_com_message *message)
{
	struct channel *channel = channel_of(file);

	for (;;) {
		int error = put(channel, message);

		if (error != -EAGAIN)
			return error;
		/* A peer that does not run makes no room. */
		if (!peer_runs(channel))
			return -ENOSPC;
		if (file->f_flags & O_NONBLOCK)
			return -EAGAIN;
		error = wait_for(channel, true);
		if (error)
			return error;
	}
}

static int receive(struct file *file, struct parador_com_message *message, size_t room)
{
	struct channel *channel = channel_of(file);

	for (;;) {
		int error = take(channel, message, room);

		if (error != -EAGAIN || file->f_flags & O_NONBLOCK)
			return error;
		error = wait_for(channel, false);
		if (error)
			return error;
	}
}

/*
 * ---- shares
 * -----------------------------------------------------------------------------------------------
 */

static u8 __iomem *share_registers(struct channel *channel, enum reg side, unsigned int share)
{
	return channel->registers + side + share * SHARE_STEP;
}

static void unpin(struct offered *offered)
{
	unpin_user_pages_dirty_lock(offered->pages, offered->count, offered->writable);
	account_locked_vm(offered->mm, offered->count, false);
	mmdrop(offered->mm);
	kfree(offered);
}

/* Pins memory of the current program. */
static struct offered *pin(unsigned long address, unsigned int count)
{
	struct offered *offered = kzalloc(struct_size(offered, pages, count), GFP_KERNEL_ACCOUNT);
	int pinned, error;
	unsigned int i;

	if (!offered)
		return ERR_PTR(-ENOMEM);
	error = account_locked_vm(current->mm, count, true);
	if (error) {
		kfree(offered);
		return ERR_PTR(error);
	}
	mmgrab(current->mm);
	offered->mm = current->mm;
	/*
	 * Even to be read they are asked for as for writing: so they are the program's own, and
	 * stay so when it writes.
	 */
	pinned = pin_user_pages_fast(address, count, FOLL_WRITE | FOLL_LONGTERM, offered->pages);
	offered->count = max(pinned, 0);
	if (pinned != count) {
		error = pinned < 0 ? pinned : -EFAULT;
		goto undo;
	}
	/* The device takes one piece. */
	for (i = 1; i < count; i++) {
		if (page_to_pfn(offered->pages[i]) != page_to_pfn(offered->pages[0]) + i) {
			error = -E2BIG;
			goto undo;
		}
	}
	return offered;

undo:
	account_locked_vm(current->mm, count - offered->count, false);
	unpin(offered);
	return ERR_PTR(error);
}

static int offer(struct file *file, const struct parador_com_offer *wanted)
{
	struct channel *channel = channel_of(file);
	struct offered *offered;
	u8 __iomem *registers;
	u64 address;
	int error = 0;

	if (wanted->share >= PARADOR_COM_SHARES || wanted->flags & ~PARADOR_COM_WRITABLE ||
	    !PAGE_ALIGNED(wanted->address) || wanted->address != (unsigned long)wanted->address ||
	    !PAGE_ALIGNED(wanted->length) || !wanted->length || wanted->length > PARADOR_COM_SHARE_BYTES)
		return -EINVAL;
	offered = pin(wanted->address, wanted->length >> PAGE_SHIFT);
	if (IS_ERR(offered))
		return PTR_ERR(offered);
	offered->owner = file;
	offered->writable = wanted->flags & PARADOR_COM_WRITABLE;
	address = page_to_phys(offered->pages[0]);

	mutex_lock(&channel->shares);
	if (channel->gone) {
		error = -ENODEV;
	} else if (channel->offered[wanted->share]) {
		error = -EBUSY;
	} else {
		registers = share_registers(channel, REG_OWN_SHARES, wanted->share);
		writel(lower_32_bits(address), registers + SHARE_ADDRESS);
		writel(upper_32_bits(address), registers + SHARE_ADDRESS_HIGH);
		writel(wanted->length, registers + SHARE_LENGTH);
		writel(COMMAND_OPEN | (offered->writable ? COMMAND_WRITE : 0), registers + SHARE_COMMAND);
		/* It knows better what is RAM. */
		if (readl(registers + SHARE_RESULT))
			error = -EFAULT;
		else
			channel->offered[wanted->share] = offered;
	}
	mutex_unlock(&channel->shares);
	if (error)
		unpin(offered);
	return error;
}

/* Takes back what a file has offered; what any file has, if there is none. */
static int revoke(struct channel *channel, unsigned int share, struct file *owner)
{
	struct offered *offered;

	if (share >= PARADOR_COM_SHARES)
		return -EINVAL;
	mutex_lock(&channel->shares);
	offered = channel->offered[share];
	if (offered && owner && offered->owner != owner)
		offered = NULL;
	if (offered) {
		writel(COMMAND_CLOSE, share_registers(channel, REG_OWN_SHARES, share) + SHARE_COMMAND);
		channel->offered[share] = NULL;
	}
	mutex_unlock(&channel->shares);
	if (!offered)
		return -ENOENT;
	unpin(offered);
	return 0;
}

static void revoke_all(struct channel *channel, struct file *owner)
{
	unsigned int share;

	for (share = 0; share < PARADOR_COM_SHARES; share++)
		revoke(channel, share, owner);
}

/* A share of the peer, or the free area, is gone: unmaps it from user space. The mutex is held. */
static void detach(struct channel *channel, unsigned int share)
{
	loff_t offset = share == FREE_AREA ? 0 : PARADOR_COM_SHARE(share);
	loff_t length = share == FREE_AREA ? channel->area : PARADOR_COM_SHARE_BYTES;
	struct mapping *mapping, *next;

	list_for_each_entry_safe(mapping, next, &channel->mappings[share], list) {
		list_del_init(&mapping->list);
		unmap_mapping_range(mapping->space, offset, length, 1);
	}
}

/*
 * Unmaps revoked shares from user space. Only this driver maps, so a share offered again is not
 * mapped.
 */
static void detach_revoked(struct channel *channel, unsigned int share)
{
	u32 state = readl(share_registers(channel, REG_PEER_SHARES, share) + SHARE_STATE);

	if ((state & 0xff) != PARADOR_COM_MAPPED)
		detach(channel, share);
}

static int list_shares(struct opened *opened, struct parador_com_list *list)
{
	struct channel *channel = opened->channel;
	unsigned int share;
	int error = 0;

	memset(list, 0, sizeof(*list));
	mutex_lock(&channel->shares);
	if (channel->gone)
		error = -ENODEV;
	/* First: a change while this looks is another one. */
	opened->seen = atomic_read(&channel->changes);
	for (share = 0; !error && share < PARADOR_COM_SHARES; share++) {
		u8 __iomem *peers = share_registers(channel, REG_PEER_SHARES, share);
		struct offered *offered = channel->offered[share];
		u32 state = readl(peers + SHARE_STATE);

		/* Unmaps all shares that the peer has revoked. */
		detach_revoked(channel, share);
		if (offered) {
			list->own[share].state =
				readl(share_registers(channel, REG_OWN_SHARES, share) + SHARE_STATE);
			list->own[share].flags = offered->writable ? PARADOR_COM_WRITABLE : 0;
			list->own[share].length = (u64)offered->count << PAGE_SHIFT;
		}
		list->peers[share].state = state & 0xff;
		list->peers[share].flags = state & STATE_WRITABLE ? PARADOR_COM_WRITABLE : 0;
		list->peers[share].length = readl(peers + SHARE_LENGTH);
	}
	mutex_unlock(&channel->shares);
	return error;
}

static vm_fault_t mapping_fault(struct vm_fault *fault)
{
	struct mapping *mapping = fault->vma->vm_private_data;
	struct channel *channel = mapping->channel;
	vm_fault_t result = VM_FAULT_SIGBUS;
	unsigned long frame;

	if (mapping->share == FREE_AREA)
		frame = PHYS_PFN(channel->area_base) + fault->pgoff;
	else
		frame = PHYS_PFN(channel->window_base) + fault->pgoff - PHYS_PFN(PARADOR_COM_SHARE(0));
	mutex_lock(&channel->shares);
	if (!list_empty(&mapping->list))
		result = vmf_insert_pfn(fault->vma, fault->address, frame);
	mutex_unlock(&channel->shares);
	return result;
}

static void mapping_open(struct vm_area_struct *area)
{
	struct mapping *mapping = area->vm_private_data;

	mutex_lock(&mapping->channel->shares);
	mapping->areas++;
	mutex_unlock(&mapping->channel->shares);
}

static void mapping_close(struct vm_area_struct *area)
{
	struct mapping *mapping = area->vm_private_data;
	struct channel *channel = mapping->channel;
	bool last;

	mutex_lock(&channel->shares);
	last = --mapping->areas == 0;
	if (last && !list_empty(&mapping->list)) {
		list_del(&mapping->list);
		if (mapping->share != FREE_AREA && list_empty(&channel->mappings[mapping->share]))
			writel(COMMAND_CLOSE,
			       share_registers(channel, REG_PEER_SHARES, mapping->share) + SHARE_COMMAND);
	}
	mutex_unlock(&channel->shares);
	if (last)
		kfree(mapping);
}

static const struct vm_operations_struct mapping_operations = {
	.open = mapping_open,
	.close = mapping_close,
	.fault = mapping_fault,
};

/* Maps a share for the device, if the area fits it. With the mutex. */
static int attach(struct channel *channel, unsigned int share, u64 end, const struct vm_area_struct *area,
		  bool *writable)
{
	u8 __iomem *registers = share_registers(channel, REG_PEER_SHARES, share);
	u32 state;

	if (channel->gone)
		return -ENODEV;
	/* Before another one can be mapped in its place. */
	detach_revoked(channel, share);
	writel(COMMAND_OPEN, registers + SHARE_COMMAND);
	state = readl(registers + SHARE_STATE);
	*writable = state & STATE_WRITABLE;
	if (readl(registers + SHARE_RESULT) || (state & 0xff) != PARADOR_COM_MAPPED)
		return -ENXIO;
	if (end > readl(registers + SHARE_LENGTH))
		return -EINVAL;
	if (area->vm_flags & VM_WRITE && !*writable)
		return -EACCES;
	return 0;
}

static void change_flags(struct vm_area_struct *area, unsigned long set, unsigned long clear)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_mod(area, set, clear);
#else
	area->vm_flags = (area->vm_flags | set) & ~clear;
#endif
}

/* A mapping that is nowhere yet; NULL: no memory. */
static struct mapping *new_mapping(struct file *file, unsigned int share)
{
	struct mapping *mapping = kzalloc(sizeof(*mapping), GFP_KERNEL_ACCOUNT);

	if (!mapping)
		return NULL;
	INIT_LIST_HEAD(&mapping->list);
	mapping->channel = channel_of(file);
	mapping->share = share;
	mapping->areas = 1;
	/* It lives as long as the areas, which hold the file, and that holds the channel. */
	mapping->space = file->f_mapping;
	return mapping;
}

/* Makes an area show a mapping. What is mapped is found when it is touched: see mapping_fault(). */
static void show(struct vm_area_struct *area, struct mapping *mapping, unsigned long clear)
{
	change_flags(area, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP, clear);
	area->vm_private_data = mapping;
	area->vm_ops = &mapping_operations;
}

/* Maps a share of the peer; offset is in its window. */
static int map_share(struct file *file, struct vm_area_struct *area, u64 offset)
{
	struct channel *channel = channel_of(file);
	unsigned int share = offset / PARADOR_COM_SHARE_BYTES;
	u64 end = offset % PARADOR_COM_SHARE_BYTES + (area->vm_end - area->vm_start);
	struct mapping *mapping;
	bool writable;
	int error;

	if (offset >= PARADOR_COM_SHARES * PARADOR_COM_SHARE_BYTES)
		return -EINVAL;
	mapping = new_mapping(file, share);
	if (!mapping)
		return -ENOMEM;

	mutex_lock(&channel->shares);
	error = attach(channel, share, end, area, &writable);
	if (!error)
		list_add(&mapping->list, &channel->mappings[share]);
	else if (error != -ENODEV && list_empty(&channel->mappings[share]))
		writel(COMMAND_CLOSE, share_registers(channel, REG_PEER_SHARES, share) + SHARE_COMMAND);
	mutex_unlock(&channel->shares);
	if (error) {
		kfree(mapping);
		return error;
	}
	show(area, mapping, writable ? 0 : VM_MAYWRITE);
	return 0;
}

/* Maps the free area from an offset on. It is RAM, so cached like other memory. */
static int map_area(struct file *file, struct vm_area_struct *area, u64 offset)
{
	struct channel *channel = channel_of(file);
	struct mapping *mapping;
	int error = 0;

	if (offset > channel->area || area->vm_end - area->vm_start > channel->area - offset)
		return -EINVAL;
	mapping = new_mapping(file, FREE_AREA);
	if (!mapping)
		return -ENOMEM;
	mutex_lock(&channel->shares);
	if (channel->gone)
		error = -ENODEV;
	else
		list_add(&mapping->list, &channel->mappings[FREE_AREA]);
	mutex_unlock(&channel->shares);
	if (error) {
		kfree(mapping);
		return error;
	}
	show(area, mapping, 0);
	return 0;
}

/*
 * ---- files
 * ------------------------------------------------------------------------------------------------
 */

static ssize_t com_write(struct file *file, const char __user *from, size_t length, loff_t *offset)
{
	struct parador_com_message message = { .length = length };
	int error;

	if (length > PARADOR_COM_PAYLOAD)
		return -EMSGSIZE;
	if (copy_from_user(message.payload, from, length))
		return -EFAULT;
	error = send(file, &message);
	return error ? error : length;
}

static ssize_t com_read(struct file *file, char __user *to, size_t room, loff_t *offset)
{
	struct parador_com_message message;
	int error = receive(file, &message, room);

	if (error)
		return error;
	return copy_to_user(to, message.payload, message.length) ? -EFAULT : message.length;
}

static __poll_t com_poll(struct file *file, poll_table *table)
{
	struct opened *opened = file->private_data;
	struct channel *channel = opened->channel;
	__poll_t events = 0;

	/* First in the queue, then the look: see ready(). */
	poll_wait(file, &channel->receive.waiting, table);
	poll_wait(file, &channel->send.waiting, table);
	if (READ_ONCE(channel->gone))
		return EPOLLERR | EPOLLHUP;
	if (ready(channel, false))
		events |= EPOLLIN | EPOLLRDNORM;
	/* Without its peer it does not wait: it fails. */
	if (ready(channel, true) || !peer_runs(channel))
		events |= EPOLLOUT | EPOLLWRNORM;
	if (READ_ONCE(opened->seen) != atomic_read(&channel->changes))
		events |= EPOLLPRI;
	return events;
}

static int look(struct channel *channel, struct parador_com_info *info)
{
	int error = 0;

	memset(info, 0, sizeof(*info));
	spin_lock(&channel->send.lock);
	if (channel->gone) {
		error = -ENODEV;
	} else {
		u8 __iomem *registers = channel->registers;

		info->own_id = readl(registers + REG_OWN_ID);
		info->peer_id = readl(registers + REG_PEER_ID);
		info->side = readl(registers + REG_SIDE);
		info->peer_runs = readl(registers + REG_PEER) == 1;
		info->has_doorbell = channel->flags & FLAG_DOORBELL;
		info->area = channel->area;
		__ioread32_copy(info->own_name, registers + REG_OWN_NAME, PARADOR_COM_NAME / 4);
		__ioread32_copy(info->peer_name, registers + REG_PEER_NAME, PARADOR_COM_NAME / 4);
	}
	spin_unlock(&channel->send.lock);
	return error;
}

static int tell(struct channel *channel, struct parador_com_info __user *to)
{
	struct parador_com_info info;
	int error = look(channel, &info);

	if (error)
		return error;
	return copy_to_user(to, &info, sizeof(info)) ? -EFAULT : 0;
}

/* /sys/class/misc/parador-com*'s attribute: the peer's name, for scripts. */
static ssize_t peer_show(struct device *device, struct device_attribute *attribute, char *to)
{
	/* misc_register has put it there. */
	struct miscdevice *misc = dev_get_drvdata(device);
	struct parador_com_info info;
	int error = look(container_of(misc, struct channel, misc), &info);

	return error ? error : sysfs_emit(to, "%.*s\n", PARADOR_COM_NAME, info.peer_name);
}
static DEVICE_ATTR_RO(peer);

static struct attribute *com_attrs[] = {
	&dev_attr_peer.attr,
	NULL
};
ATTRIBUTE_GROUPS(com);

static long com_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	void __user *there = (void __user *)argument;
	struct parador_com_message message;
	struct parador_com_offer wanted;
	struct parador_com_list list;
	u32 share;
	int error;

	switch (command) {
	case PARADOR_COM_INFO:
		return tell(channel_of(file), there);
	case PARADOR_COM_SEND:
		if (copy_from_user(&message, there, sizeof(message)))
			return -EFAULT;
		if (message.length > PARADOR_COM_PAYLOAD)
			return -EMSGSIZE;
		return send(file, &message);
	case PARADOR_COM_RECEIVE:
		error = receive(file, &message, PARADOR_COM_PAYLOAD);
		if (error)
			return error;
		return copy_to_user(there, &message, sizeof(message)) ? -EFAULT : 0;
	case PARADOR_COM_OFFER:
		if (copy_from_user(&wanted, there, sizeof(wanted)))
			return -EFAULT;
		return offer(file, &wanted);
	case PARADOR_COM_REVOKE:
		if (get_user(share, (u32 __user *)there))
			return -EFAULT;
		return revoke(channel_of(file), share, file);
	case PARADOR_COM_LIST:
		error = list_shares(file->private_data, &list);
		if (error)
			return error;
		return copy_to_user(there, &list, sizeof(list)) ? -EFAULT : 0;
	default:
		return -ENOTTY;
	}
}

static int com_mmap(struct file *file, struct vm_area_struct *area)
{
	u64 offset = (u64)area->vm_pgoff << PAGE_SHIFT;

	/* A private copy would share nothing. */
	if (!(area->vm_flags & VM_SHARED))
		return -EINVAL;
	if (offset >= PARADOR_COM_SHARE(0))
		return map_share(file, area, offset - PARADOR_COM_SHARE(0));
	return map_area(file, area, offset);
}

static void channel_free(struct kref *references)
{
	kfree(container_of(references, struct channel, references));
}

static int com_open(struct inode *inode, struct file *file)
{
	/* misc_open has put the miscdevice here, and misc_deregister waits for it. */
	struct channel *channel = container_of(file->private_data, struct channel, misc);
	struct opened *opened = kzalloc(sizeof(*opened), GFP_KERNEL_ACCOUNT);

	if (!opened)
		return -ENOMEM;
	kref_get(&channel->references);
	opened->channel = channel;
	opened->seen = atomic_read(&channel->changes);
	file->private_data = opened;
	return stream_open(inode, file);
}

static int com_release(struct inode *inode, struct file *file)
{
	struct opened *opened = file->private_data;
	struct channel *channel = opened->channel;

	revoke_all(channel, file);
	kfree(opened);
	kref_put(&channel->references, channel_free);
	return 0;
}

static const struct file_operations com_operations = {
	.owner = THIS_MODULE,
	.open = com_open,
	.release = com_release,
	.read = com_read,
	.write = com_write,
	.poll = com_poll,
	.unlocked_ioctl = com_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = com_mmap,
	.llseek = no_llseek,
};

/*
 * ---- device
 * -----------------------------------------------------------------------------------------------
 */

static void wake(struct end *end)
{
	/* A waiter that sleeps again sets `want` again. */
	WRITE_ONCE(*end->own_want, 0);
	wake_up_interruptible_all(&end->waiting);
}

static irqreturn_t rung(int irq, void *data)
{
	struct channel *channel = data;

	wake(&channel->receive);
	wake(&channel->send);
	return IRQ_HANDLED;
}

/*
 * The peer ended or was started, or a share changed: who waits looks again. In a thread, since it
 * takes time.
 */
static irqreturn_t event(int irq, void *data)
{
	struct channel *channel = data;
	u32 events = readl(channel->registers + REG_EVENTS);
	unsigned int share;

	writel(events, channel->registers + REG_EVENTS);
	mutex_lock(&channel->shares);
	for (share = 0; share < PARADOR_COM_SHARES; share++)
		detach_revoked(channel, share);
	mutex_unlock(&channel->shares);
	atomic_inc(&channel->changes);
	return rung(irq, data);
}

static void end_init(struct end *end, u8 *memory, u32 ring, bool sender)
{
	u8 *words = memory + WORDS(ring);

	spin_lock_init(&end->lock);
	init_waitqueue_head(&end->waiting);
	end->own = (u32 *)(words + (sender ? TAIL : HEAD));
	end->peers = (u32 *)(words + (sender ? HEAD : TAIL));
	end->own_want = (u32 *)(words + (sender ? WANT_ROOM : WANT_MESSAGES));
	end->peers_want = (u32 *)(words + (sender ? WANT_MESSAGES : WANT_ROOM));
	end->entries = (struct parador_com_message *)(memory + ENTRIES(ring));
	start(end, sender);
}

/* Where a channel is, whatever bus it is on. */
struct place {
	u8 __iomem *registers;
	struct resource *memory;
	struct resource *window;	/* of the peer's shares */
	int irqs[2];			/* the doorbell, and events */
};

static int request_interrupts(struct channel *channel)
{
	int error = request_irq(channel->irqs[0], rung, 0, channel->name, channel);

	if (error)
		return error;
	error = request_threaded_irq(channel->irqs[1], NULL, event, IRQF_ONESHOT, channel->name,
				     channel);
	if (error)
		free_irq(channel->irqs[0], channel);
	return error;
}

static void free_interrupts(struct channel *channel)
{
	free_irq(channel->irqs[1], channel);
	free_irq(channel->irqs[0], channel);
}

static int com_add(struct device *device, const struct place *place)
{
	u8 __iomem *registers = place->registers;
	struct channel *channel;
	u8 *memory;
	unsigned int share;
	u32 size, side;
	void *window;
	int error;

	size = readl(registers + REG_SIZE);
	side = readl(registers + REG_SIDE);
	if (readl(registers + REG_MAGIC) != MAGIC || readl(registers + REG_VERSION) != VERSION ||
	    side > 1 || size <= AREA || size > resource_size(place->memory) ||
	    resource_size(place->window) < PARADOR_COM_SHARES * PARADOR_COM_SHARE_BYTES)
		return dev_err_probe(device, -ENODEV, "not a channel of this version\n");
	memory = devm_memremap(device, place->memory->start, size, MEMREMAP_WB);
	if (IS_ERR(memory))
		return PTR_ERR(memory);
	/* Not accessed here. It is what makes programs' mappings of it cached. */
	window = devm_memremap(device, place->window->start,
			       PARADOR_COM_SHARES * PARADOR_COM_SHARE_BYTES, MEMREMAP_WB);
	if (IS_ERR(window))
		return PTR_ERR(window);

	/* Open files may outlive the device. */
	channel = kzalloc(sizeof(*channel), GFP_KERNEL);
	if (!channel)
		return -ENOMEM;
	kref_init(&channel->references);
	channel->registers = registers;
	memcpy(channel->irqs, place->irqs, sizeof(channel->irqs));
	channel->number = readl(registers + REG_NUMBER);
	channel->flags = readl(registers + REG_FLAGS);
	channel->area = size - AREA;
	channel->area_base = place->memory->start + AREA;
	channel->window_base = place->window->start;
	mutex_init(&channel->shares);
	for (share = 0; share < MAPPABLE; share++)
		INIT_LIST_HEAD(&channel->mappings[share]);
	snprintf(channel->name, sizeof(channel->name), "parador-com%u", channel->number);
	/* Ring 0 goes from side 0 to side 1. */
	end_init(&channel->send, memory, side, true);
	end_init(&channel->receive, memory, 1 - side, false);

	error = request_interrupts(channel);
	if (error)
		goto free;
	dev_set_drvdata(device, channel);
	channel->misc.minor = MISC_DYNAMIC_MINOR;
	channel->misc.name = channel->name;
	channel->misc.fops = &com_operations;
	channel->misc.parent = device;
	channel->misc.groups = com_groups;
	error = misc_register(&channel->misc);
	if (error)
		goto undo;
	/* Wakes all waiters that slept before this VM was restarted. */
	ring_doorbell(channel);
	dev_info(device, "%s, side %u, %llu bytes to map\n", channel->name, side, channel->area);
	return 0;

undo:
	free_interrupts(channel);
free:
	kref_put(&channel->references, channel_free);
	return error;
}

static void com_remove(struct channel *channel)
{
	unsigned int share;

	misc_deregister(&channel->misc);
	free_interrupts(channel);
	mutex_lock(&channel->shares);
	spin_lock(&channel->send.lock);
	spin_lock(&channel->receive.lock);
	channel->gone = true;
	spin_unlock(&channel->receive.lock);
	spin_unlock(&channel->send.lock);
	detach(channel, FREE_AREA);
	for (share = 0; share < PARADOR_COM_SHARES; share++) {
		detach(channel, share);
		writel(COMMAND_CLOSE, share_registers(channel, REG_PEER_SHARES, share) + SHARE_COMMAND);
	}
	mutex_unlock(&channel->shares);
	/* Nothing is offered from now on, and the registers are still there. */
	revoke_all(channel, NULL);
	wake_up_interruptible_all(&channel->receive.waiting);
	wake_up_interruptible_all(&channel->send.waiting);
	kref_put(&channel->references, channel_free);
}

static int com_pci_probe(struct pci_dev *pci, const struct pci_device_id *id)
{
	struct place place = {
		.memory = &pci->resource[MEMORY],
		.window = &pci->resource[WINDOW],
	};
	int vector, error;

	error = pcim_enable_device(pci);
	if (error)
		return error;
	error = pcim_iomap_regions(pci, BIT(REGISTERS), KBUILD_MODNAME);
	if (error)
		return error;
	place.registers = pcim_iomap_table(pci)[REGISTERS];
	pci_set_master(pci);
	error = pci_alloc_irq_vectors(pci, 2, 2, PCI_IRQ_MSIX);
	if (error < 0)
		return error;
	for (vector = 0; vector < 2; vector++)
		place.irqs[vector] = pci_irq_vector(pci, vector);
	error = com_add(&pci->dev, &place);
	if (error)
		pci_free_irq_vectors(pci);
	return error;
}

static void com_pci_remove(struct pci_dev *pci)
{
	com_remove(pci_get_drvdata(pci));
	pci_free_irq_vectors(pci);
}

static const struct pci_device_id com_pci_ids[] = {
	{ PCI_DEVICE(VENDOR, DEVICE) },
	{ }
};
MODULE_DEVICE_TABLE(pci, com_pci_ids);

static struct pci_driver com_pci_driver = {
	.name = KBUILD_MODNAME,
	.id_table = com_pci_ids,
	.probe = com_pci_probe,
	.remove = com_pci_remove,
};

#ifdef CONFIG_OF
/* Without a bus: three ranges and two interrupts in the device tree. */
static int com_platform_probe(struct platform_device *platform)
{
	struct place place = {
		.memory = platform_get_resource(platform, IORESOURCE_MEM, 1),
		.window = platform_get_resource(platform, IORESOURCE_MEM, 2),
	};
	int line;

	place.registers = devm_platform_ioremap_resource(platform, 0);
	if (IS_ERR(place.registers))
		return PTR_ERR(place.registers);
	if (!place.memory || !place.window)
		return dev_err_probe(&platform->dev, -ENODEV, "no memory in the device tree\n");
	for (line = 0; line < 2; line++) {
		place.irqs[line] = platform_get_irq(platform, line);
		if (place.irqs[line] < 0)
			return place.irqs[line];
	}
	return com_add(&platform->dev, &place);
}

static int com_platform_remove(struct platform_device *platform)
{
	com_remove(platform_get_drvdata(platform));
	return 0;
}

static const struct of_device_id com_platform_ids[] = {
	{ .compatible = "parador,channel" },
	{ }
};
MODULE_DEVICE_TABLE(of, com_platform_ids);

static struct platform_driver com_platform_driver = {
	.driver = {
		.name = KBUILD_MODNAME,
		.of_match_table = com_platform_ids,
	},
	.probe = com_platform_probe,
	.remove = com_platform_remove,
};
#endif

static int __init com_init(void)
{
	int error = pci_register_driver(&com_pci_driver);

#ifdef CONFIG_OF
	if (error)
		return error;
	error = platform_driver_register(&com_platform_driver);
	if (error)
		pci_unregister_driver(&com_pci_driver);
#endif
	return error;
}

static void __exit com_exit(void)
{
#ifdef CONFIG_OF
	platform_driver_unregister(&com_platform_driver);
#endif
	pci_unregister_driver(&com_pci_driver);
}

module_init(com_init);
module_exit(com_exit);

MODULE_DESCRIPTION("Channels between virtual machines on Parador");
MODULE_LICENSE("GPL");
